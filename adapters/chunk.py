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
    Landed,
    Sink,
    Transport,
)
from adapters.paths import ROOT, children, path_of
from adapters.store import Store

if TYPE_CHECKING:
    from adapters.arena import SharedMemory

__all__ = ["INLINE_LIMIT", "Chunk", "Payload", "body_fields", "find_nonfinite", "pack", "pack_wait", "unpack"]

Payload = dict[str, Any]

INLINE_LIMIT = 16 * 1024  #: bytes; larger tensors travel by handle
SPILL_AFTER_S = 1.0  #: an arena that stays full for so long has its tensors go to disk

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


def pack(payload: Payload, seq: int, transport: Sink | None, *, last: bool = False) -> Chunk:
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
                transport.undo(handle.block)
        if isinstance(error, _Refused):
            kind = type(error.value).__name__
            raise BadPayload(f"{path_of(error.value, payload)}: {kind} can't travel") from None
        if isinstance(error, _ENCODING_ERRORS):
            raise BadPayload(f"{_blame(payload)}: {error}") from None
        raise


async def pack_wait(
    payload: Payload,
    seq: int,
    arena: SharedMemory,
    *,
    last: bool = False,
    timeout_s: float = 30.0,
    name: str = "",
    durable: bool = False,
    stored: bool = False,
    spill_after_s: float = SPILL_AFTER_S,
) -> Chunk:
    """Like :func:`pack`, but an arena that is full is waited for, and then done without.

    Args:
        payload: Must not change before this returns.
        seq: The chunk's number.
        arena: Where large tensors go.
        last: Whether the chunk ends its task's output.
        timeout_s: How long to wait for blocks to come back where the tensors can't go to disk.
        name: The request's name. With it, and a store in the arena, tensors go to the store when the arena
            stays full for ``spill_after_s``, and at once when waiting can't help.
        durable: Each tensor that goes by handle is in the store too when this returns. Needs name and store.
        stored: Tensors that go by handle go to the store at once, not to the arena. Needs name and store.
        spill_after_s: See there.

    Raises :class:`ArenaFull` when there is no room in time. Nothing is left in arena or store after an error,
    or after a cancellation (the files go a little later).
    """
    store = arena.store if name else None
    if store is None and (durable or stored):
        raise ValueError("a chunk for the store needs its request's name, and an arena with a store")
    if store is not None and stored:
        return await _stored(payload, seq, store, name, last)
    deadline = time.monotonic() + (timeout_s if store is None else min(timeout_s, spill_after_s))
    while True:
        since = arena.frees
        try:
            chunk = pack(payload, seq, arena, last=last)
        except ArenaFull as full:
            left = deadline - time.monotonic()
            if not full.retryable or left <= 0:
                if store is None:
                    raise
                break
        else:
            return await _copied(chunk, arena, store, name) if durable and store is not None else chunk
        # Others may make room in the folder without our hearing of it, so look again now and then.
        await arena.freed(since, min(left, 0.25))
    return await _stored(payload, seq, store, name, last)


async def _stored(payload: Payload, seq: int, store: Store, name: str, last: bool) -> Chunk:
    """The chunk with its tensors in the store."""
    spill = _Spill(store, name)
    return await store.on_thread(
        lambda: pack(payload, seq, spill, last=last), lambda unsent: _free(unsent.handles, spill)
    )


class _Spill:
    """A request's part of the store, as the place where its tensors go."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def put(self, value: Any) -> Handle:
        array, dtype = tensor.plain(value)
        place = self._store.put(self._name, tensor.contiguous(array))
        return Handle(self._store.transport, BlockId(place, 0, 0), array.nbytes, dtype, array.shape)

    def free(self, block: BlockId) -> None:
        self._store.unlink(block.place)

    undo = free


async def _copied(chunk: Chunk, arena: SharedMemory, store: Store, name: str) -> Chunk:
    """Gives each handle of our chunk a copy in the store. Frees them all if that fails."""

    def write() -> list[str]:
        places: list[str] = []
        try:
            for handle in chunk.handles:
                array, _ = tensor.plain(arena.get(handle, lambda block: None))  # ours, so it can't change
                places.append(store.put(name, tensor.contiguous(array)))
        except BaseException:
            unlink(places)
            raise
        return places

    def unlink(places: list[str]) -> None:
        for place in places:
            store.unlink(place)

    if not chunk.handles:
        return chunk
    try:
        places = await store.on_thread(write, unlink)
    except BaseException:
        _free(chunk.handles, arena)
        raise
    chunk.handles = [
        msgspec.structs.replace(handle, copy=place)
        for handle, place in zip(chunk.handles, places, strict=True)
    ]
    return chunk


def _free(handles: list[Handle], transport: Sink) -> None:
    for handle in handles:
        transport.free(handle.block)


def _refuse(value: object) -> Any:
    raise _Refused(value)


def _scalar(value: object) -> bool | int | float:
    if isinstance(value, np.bool_ | np.integer | np.floating):
        item = value.item()
        if isinstance(item, bool | int | float):  # a longdouble stays what it is
            return item
    raise _Refused(value)


def _extension(value: object, handles: list[Handle], transport: Sink | None) -> msgspec.msgpack.Ext:
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
    gone, or before this returns or raises for a handle that has become no view. Not for those that have
    landed: their blocks have gone back already.

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
            if type(handle) is not Landed:
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
