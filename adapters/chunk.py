"""The codec between what engines yield and what travels.

Engines yield and receive *payloads*: plain dicts of scalars, strings, bytes, lists, and tensors. On the wire
a payload is a :class:`Chunk`: a msgpack body with the small fields (and tensors under ``INLINE_LIMIT``
bytes), and a handle for each larger tensor.

In the body a tensor is a msgpack extension: either the number of its handle, or the tensor itself. Tuples
arrive as lists, NumPy scalars as Python's, and tensors of NumPy's dtypes as NumPy arrays even if they were
torch's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from adapters import tensor
from adapters.finite import find_nonfinite
from adapters.handle import (
    AdapterError,
    ArenaFull,
    BadHandle,
    BadPayload,
    BlockId,
    Chunk,
    Handle,
    Transport,
)
from adapters.paths import ROOT, children, path_of

if TYPE_CHECKING:
    from adapters.arena import SharedMemory

__all__ = ["INLINE_LIMIT", "Chunk", "Payload", "body_fields", "find_nonfinite", "pack", "pack_wait", "unpack"]

Payload = dict[str, Any]

INLINE_LIMIT = 16 * 1024  #: bytes; larger tensors travel by handle

_BY_HANDLE = 1  # msgpack extension: a msgpack integer, the index into Chunk.handles
_INLINE = 2  # msgpack extension: an _Inline


class _Inline(msgspec.Struct, array_like=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Refused(Exception):
    """The encoder met a value that it can't encode by itself."""

    def __init__(self, value: object) -> None:
        self.value = value


# --- sending


def pack(payload: Payload, seq: int, transport: Transport | None, *, last: bool = False) -> Chunk:
    """Encodes a payload; large tensors go through the transport (without one, all go inline).

    Raises :class:`UnsupportedTensor`, :class:`BadPayload` or :class:`ArenaFull`, each naming the field. After
    an error nothing of the payload is left in the transport.
    """
    if not isinstance(payload, dict):
        raise BadPayload(f"a payload is a dict, not {type(payload).__name__}")
    try:
        return Chunk(seq, last, msgspec.Raw(_encode_small(payload)))
    except _Refused:
        pass  # it holds tensors
    except _ENCODING_ERRORS as error:
        raise BadPayload(f"{_blame(payload)}: {error}") from None
    handles: list[Handle] = []

    def hook(value: Any) -> Any:
        if not tensor.is_tensor(value):
            return _scalar(value)
        try:
            return _extension(value, handles, transport)
        except AdapterError as error:
            error.args = (f"{path_of(value, payload)}: {error}",)
            raise

    try:
        return Chunk(seq, last, msgspec.Raw(msgspec.msgpack.encode(payload, enc_hook=hook)), handles)
    except BaseException as error:
        if transport is not None:
            for handle in handles:
                transport.free(handle.block)
        if isinstance(error, _Refused):
            kind = type(error.value).__name__
            raise BadPayload(f"{path_of(error.value, payload)}: {kind} can't travel") from None
        if isinstance(error, _ENCODING_ERRORS):
            raise BadPayload(f"{_blame(payload)}: {error}") from None
        raise


async def pack_wait(
    payload: Payload, seq: int, arena: SharedMemory, *, last: bool = False, timeout_s: float = 30.0
) -> Chunk:
    """Like :func:`pack`, but waits for blocks to come back while the arena is full.

    Raises :class:`ArenaFull` after ``timeout_s``, and at once when waiting can't help.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        since = arena.frees
        try:
            return pack(payload, seq, arena, last=last)
        except ArenaFull as full:
            left = deadline - time.monotonic()
            if not full.retryable or left <= 0:
                raise
        # Others may make room in the folder without our hearing of it, so look again now and then.
        await arena.freed(since, min(left, 0.25))


def _refuse(value: object) -> Any:
    raise _Refused(value)


def _scalar(value: object) -> bool | int | float:
    if isinstance(value, np.bool_ | np.integer | np.floating):
        item = value.item()
        if isinstance(item, bool | int | float):  # a longdouble stays what it is
            return item
    raise _Refused(value)


def _extension(value: object, handles: list[Handle], transport: Transport | None) -> msgspec.msgpack.Ext:
    array, dtype = tensor.plain(value)
    if array.nbytes <= INLINE_LIMIT or transport is None:
        return msgspec.msgpack.Ext(_INLINE, _encode(_Inline(dtype, array.shape, array.tobytes())))
    handles.append(transport.put(value))
    return msgspec.msgpack.Ext(_BY_HANDLE, _encode(len(handles) - 1))


_encode = msgspec.msgpack.Encoder().encode
_encode_small = msgspec.msgpack.Encoder(enc_hook=_refuse).encode
_probe = msgspec.msgpack.Encoder(enc_hook=lambda value: None).encode
_ENCODING_ERRORS = (TypeError, ValueError, OverflowError, RecursionError)


# --- receiving


def unpack(chunk: Chunk, transport: Transport | None, released: Callable[[BlockId], None]) -> Payload:
    """Decodes a chunk; tensors come as read-only zero-copy views.

    ``released`` is called exactly once for each handle of the chunk: when the last view of its tensor is
    gone, or before this returns or raises for a handle that has become no view.

    Raises :class:`BadHandle` or :class:`BadPayload` for a chunk that doesn't hold together, and
    :class:`UnsupportedTensor` for a dtype that needs torch where torch is absent.
    """
    if not chunk.handles:
        return _decode(_decode_small, chunk.body)
    unused = dict(enumerate(chunk.handles))

    def hook(code: int, data: memoryview) -> Any:
        if code != _BY_HANDLE:
            return _inline(code, data)
        index = _decode_index(data)
        if transport is None or index not in unused:
            raise BadHandle(f"handle {index} of {len(chunk.handles)} is absent, or used twice")
        view = transport.get(unused[index], released)
        del unused[index]
        return view

    try:
        return _decode(partial(msgspec.msgpack.decode, ext_hook=hook), chunk.body)
    finally:
        for handle in unused.values():
            released(handle.block)


def body_fields(body: msgspec.Raw) -> Payload:
    """The small fields of a chunk's body, None in the place of each tensor. Raises :class:`BadPayload`."""
    return _decode(_decode_fields, body)


def _decode(decode: Callable[[msgspec.Raw], Any], body: msgspec.Raw) -> Payload:
    try:
        payload = decode(body)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise BadPayload(f"the body of a chunk holds no payload: {error}") from None
    # Checked here, because a typed decoder with a hook of its own is slow to make.
    if type(payload) is not dict or not all(type(key) is str for key in payload):
        raise BadPayload("the body of a chunk is no map from names to values")
    return payload


def _inline(code: int, data: memoryview) -> Any:
    if code != _INLINE:
        raise BadHandle(f"msgpack extension {code} where {_BY_HANDLE} or {_INLINE} is allowed here")
    inline = _decode_inline(data)
    return tensor.from_bytes(inline.dtype, inline.shape, inline.data)


_decode_small = msgspec.msgpack.Decoder(ext_hook=_inline).decode
_decode_fields = msgspec.msgpack.Decoder(ext_hook=lambda code, data: None).decode
_decode_inline = msgspec.msgpack.Decoder(_Inline).decode
_decode_index = msgspec.msgpack.Decoder(int).decode


# --- naming the field


def _blame(value: Any, path: str = ROOT) -> str:
    """The path of the deepest part that can't be encoded."""
    for step, child in children(value):
        try:
            _probe(child)
        except _ENCODING_ERRORS:
            # A list that holds itself has no deepest part.
            return _blame(child, path + step) if path.count(".") + path.count("[") < 8 else path
    return path
