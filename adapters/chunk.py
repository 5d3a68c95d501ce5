"""The codec between what engines yield and what travels.

Engines yield and receive *payloads*: plain dicts of scalars, strings, bytes, lists, and tensors. On the wire
a payload is a :class:`Chunk`: a msgpack body with the small fields (and tensors under ``inline_limit``
bytes), and a handle for each larger tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from adapters.handle import BlockId, Handle, Transport

Payload = dict[str, Any]

INLINE_LIMIT = 16 * 1024  #: bytes; larger tensors travel by handle


class Chunk(msgspec.Struct, array_like=True):
    """One numbered piece of a task's output.

    ``seq`` counts from 0 within (request, stage); ``last`` marks the end of the task's output (it may ride
    on the last chunk). The broker reads ``handles`` and never ``body``.
    """

    seq: int
    last: bool
    body: msgspec.Raw
    handles: list[Handle] = []


def pack(payload: Payload, seq: int, transport: Transport | None, *, last: bool = False) -> Chunk:
    """Encodes a payload; large tensors go through the transport. Raises AdapterError kinds."""
    raise NotImplementedError


def unpack(chunk: Chunk, transport: Transport | None, released: Callable[[BlockId], None]) -> Payload:
    """Decodes a chunk; tensors come as read-only zero-copy views. Raises AdapterError kinds."""
    raise NotImplementedError
