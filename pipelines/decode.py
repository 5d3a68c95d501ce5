"""From plain YAML data to the structs of :mod:`pipelines.graph`, with errors that name the exact key.

msgspec would do the same faster, but its errors leave out which stage of ``stages`` was wrong, the value,
and what keys there are.
"""

from __future__ import annotations

import re
import types
import typing
from typing import Any, TypeVar

import msgspec
from msgspec.structs import FieldInfo

from pipelines.errors import PipelineError, choices

T = TypeVar("T")
_AT = re.compile(r" - at `\$.*$")


def fields(kind: type[msgspec.Struct]) -> dict[str, FieldInfo]:
    """A struct's fields by their names in YAML."""
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def decode(value: Any, kind: type[T], key: str = "") -> T:
    """Converts a value. Raises :class:`PipelineError` with the key path below ``key``."""
    return typing.cast("T", _decode(value, kind, key))


def join(key: str, name: object) -> str:
    """A key path one step deeper."""
    return f"{key}.{name}" if key else str(name)


def _decode(value: Any, kind: Any, key: str) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = _branch(value, kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _struct(value, kind, key)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict and arguments[1] is not Any:
        _expect(value, dict, "a map", key)
        return {name: _decode(item, arguments[1], join(key, name)) for name, item in value.items()}
    if origin is list:
        _expect(value, list, "a list", key)
        return [_decode(item, arguments[0], f"{key}[{i}]") for i, item in enumerate(value)]
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if values := _literals(kind):
            problem = f"{_shown(value)} is none of the values; {choices(value, values)}"
            raise PipelineError(problem, key=key) from None
        problem = _AT.sub("", str(error)).replace("`", "").replace("Expected", "expected")
        problem = problem.replace("| object", "or a map")
        raise PipelineError(f"{_shown(value)}: {problem}", key=key) from None


def _literals(kind: Any) -> list[str]:
    """The values that a Literal, or a union with one, allows."""
    if typing.get_origin(kind) is typing.Literal:
        return [str(value) for value in typing.get_args(kind)]
    return [value for part in typing.get_args(kind) for value in _literals(part)]


def _branch(value: Any, union: Any) -> Any:
    """The one part of a union that a value of this shape must fit, or the union itself for scalars."""
    parts = [part for part in typing.get_args(union) if part is not type(None)]
    for part in parts:
        struct = isinstance(part, type) and issubclass(part, msgspec.Struct)
        if struct and (isinstance(value, dict) or (value is not None and len(parts) == 1)):
            return part
        if typing.get_origin(part) is list and isinstance(value, list):
            return part
    return union


def _struct(value: Any, kind: type[msgspec.Struct], key: str) -> Any:
    _expect(value, dict, "a map", key)
    known = fields(kind)
    for name in value:
        if name not in known:
            raise PipelineError(f"unknown key {name!r}; {choices(name, known)}", key=join(key, name))
    for name, field in known.items():
        if field.required and name not in value:
            raise PipelineError(f"the key {name!r} is missing", key=key)
    return kind(
        **{known[name].name: _decode(item, known[name].type, join(key, name)) for name, item in value.items()}
    )


def _expect(value: Any, kind: type, words: str, key: str) -> None:
    if not isinstance(value, kind):
        raise PipelineError(f"{_shown(value)}: expected {words}", key=key)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
