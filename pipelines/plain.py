"""YAML to plain data that JSON and msgpack can carry: maps with text keys, lists, text, numbers, booleans."""

from __future__ import annotations

import math
from typing import Any

import yaml

from pipelines.errors import PipelineError

MAX_BYTES = 1 << 20  #: of a document
MAX_VALUES = 20_000  #: in it, with what YAML's aliases repeat
MAX_DEPTH = 50  #: of maps and lists in each other


def read(text: str | bytes) -> Any:
    """Parses one YAML document. Raises :class:`PipelineError` with a line or a key path."""
    if len(text) > MAX_BYTES:
        raise PipelineError(f"larger than {MAX_BYTES} bytes")
    try:
        document = yaml.load(text, _UniqueKeys)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise PipelineError(f"no valid YAML: {problem}", key=where) from None
    except ValueError as error:  # a date like 2024-99-99
        raise PipelineError(f"no valid YAML: {error}") from None
    _check(document)
    return document


class _UniqueKeys(yaml.SafeLoader):
    """YAML without code, and without the rule that the last of two equal keys wins."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            mark = parent.start_mark if parent else None
            raise yaml.composer.ComposerError(None, None, f"nested more than {MAX_DEPTH} deep", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                problem = f"the key {name!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def _check(document: Any) -> None:
    todo: list[tuple[str, Any]] = [("", document)]
    seen = 0
    while todo:
        key, value = todo.pop()
        seen += 1
        if seen > MAX_VALUES:
            raise PipelineError(f"more than {MAX_VALUES} values, or a value within itself")
        if isinstance(value, dict):
            for name, item in value.items():
                path = f"{key}.{name}" if key else str(name)
                if not isinstance(name, str):  # YAML takes `no:` for false and `1:` for a number
                    raise PipelineError(f"the key {name!r} is no text; put it in quotes", key=path)
                todo.append((path, item))
        elif isinstance(value, list):
            todo += [(f"{key}[{number}]", item) for number, item in enumerate(value)]
        else:
            _check_scalar(key, value)


def _check_scalar(key: str, value: Any) -> None:
    if not isinstance(value, str | int | float | None):
        raise PipelineError(f"{value!r}: a {type(value).__name__} can't be used; put it in quotes", key=key)
    if isinstance(value, float) and not math.isfinite(value):
        raise PipelineError(f"{value}: expected a finite number", key=key)
    if isinstance(value, int) and value.bit_length() > 63:
        raise PipelineError(f"{str(value)[:80]}: the number is too large", key=key)
