"""Messages in one line each, short enough to be read by the thousand."""

from __future__ import annotations

import re

import msgspec

from adapters.handle import BlockId, Chunk, Handle
from broker.protocol import Error
from pipelines.graph import Pipeline


def describe(value: object) -> str:
    """A message (or a part of one) as ``Name(field, ...)``, without what says nothing."""
    if isinstance(value, Chunk):
        handles = "".join(f" {describe(handle)}" for handle in value.handles)
        return f"#{value.seq}{'!' * value.last}={msgspec.msgpack.decode(value.body)}{handles}"
    if isinstance(value, Handle):
        return describe(value.block) + (f"~{value.copy}" if value.copy else "")
    if isinstance(value, BlockId):
        return f"{_short(value.place)}@{value.offset}"
    if isinstance(value, Error):
        return f"{value.type}: {value.message}"
    if isinstance(value, Pipeline):
        return value.name
    if isinstance(value, msgspec.Struct):
        fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
        shown = ", ".join(f"{name}={describe(v)}" for name, v in fields if v not in (None, [], {}, "", b""))
        return f"{type(value).__name__}({shown})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(describe(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, msgspec.Raw):
        return str(msgspec.msgpack.decode(value))
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return _short(str(value))


def _short(text: str) -> str:
    """Arenas of the simulation by their number alone."""
    return re.sub(r"omni-[0-9a-f]{16}-0*([0-9a-f]+)-", r"arena\1-", text)
