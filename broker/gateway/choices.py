"""What a field may be, for errors that say what it can't be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import inspect

_STEP = re.compile(r"\.(?P<field>\w+)|\[[^\]]*\]")


def choices(kind: Any, path: str) -> list[str]:
    """The values that a field of a body may have, if there are only a few; else nothing.

    Args:
        kind: The body's type.
        path: The field's place, as msgspec's errors have it: ``.messages[0].role``.
    """
    nodes = _alternatives([inspect.type_info(kind)])
    for step in _STEP.finditer(path):
        found = [*_below(nodes, step["field"])]
        tags = [node.tag for node in nodes if isinstance(node, inspect.StructType) and node.tag is not None]
        if not found and tags:  # the field that tells which of several objects it is
            return [str(tag) for tag in tags]
        nodes = _alternatives(found)
    return [str(v) for node in nodes if isinstance(node, inspect.LiteralType) for v in node.values]


def _alternatives(nodes: Iterable[Any]) -> list[Any]:
    """The same, with unions and notes on types taken apart."""
    flat: list[Any] = []
    for node in nodes:
        if isinstance(node, inspect.Metadata):
            flat += _alternatives([node.type])
        elif isinstance(node, inspect.UnionType):
            flat += _alternatives(node.types)
        else:
            flat.append(node)
    return flat


def _below(nodes: Iterable[Any], field: str | None) -> Iterator[Any]:
    """The types of a field, or of an element where there is none."""
    for node in nodes:
        if field is None and isinstance(node, inspect.ListType):
            yield node.item_type
        elif field is not None and isinstance(node, inspect.StructType):
            yield from (own.type for own in node.fields if own.encode_name == field)
