"""Where a tensor lies, the chunks that travel with such handles, and what a transport must do.

A handle travels in message envelopes; the bytes it names never do. Every transport (shared memory now,
others between machines later) implements :class:`Transport`, so callers never know which one they hold.

No NumPy here: the broker and the guardians read chunks, but never a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

STORES = ("disk", "mooncake")  #: transports whose blocks are places in a store, see :mod:`adapters.store`


class BlockId(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Names one block of one producer for ever: a reused place has another generation."""

    place: str  #: the segment (for shared memory: the file's name, without a folder)
    offset: int  #: bytes from the segment's start
    generation: int  #: counts the uses of the segment's space


class Handle(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where one tensor lies.

    ``nbytes`` equals the product of ``shape`` times the item size of ``dtype``: tensors are stored
    C-contiguous, whatever their strides were at the sender.
    """

    transport: str  #: "shm", or a store's: "disk" or "mooncake" (then ``block.place`` is a place in it)
    block: BlockId
    nbytes: int
    dtype: str  #: torch's name without the prefix: "float32", "bfloat16", "float8_e4m3fn", "bool", ...
    shape: tuple[int, ...]
    copy: str = ""  #: place in the store with the same bytes, for when the block itself is gone

    @property
    def file(self) -> str:
        """The place in the store that holds the bytes, or a copy of them; "": none."""
        return self.copy or (self.block.place if self.transport in STORES else "")


#: Stands for the block of a handle that has landed: the block itself has gone back to its host.
LANDED = BlockId("landed", 0, 0)


class Landed(Handle, frozen=True, array_like=True, gc=False, kw_only=True):
    """A handle that has its tensor's bytes with it, pulled from another host. Never sent to anybody."""

    data: Any


class Chunk(msgspec.Struct, array_like=True):
    """One numbered piece of a task's output.

    ``seq`` counts from 0 within (request, stage); ``last`` marks the end of the task's output (it may ride
    on the last chunk). The broker reads ``handles`` and never ``body``.
    """

    seq: int
    last: bool
    body: msgspec.Raw
    handles: list[Handle] = []


def size_of(chunk: Chunk) -> int:
    """Bytes of a chunk, its tensors included: what flow control counts."""
    return len(chunk.body) + sum([handle.nbytes for handle in chunk.handles])


def blocks_of(chunk: Chunk) -> list[BlockId]:
    """The blocks that who holds this chunk has to release; those that have landed are released already."""
    return [handle.block for handle in chunk.handles if type(handle) is not Landed]


class AdapterError(Exception):
    """Anything that goes wrong at a stage border. ``retryable`` says whether a later try can help."""

    retryable = False


class UnsupportedTensor(AdapterError):
    """The sender's tensor can't be carried (sparse, object dtype, quantised, not on the CPU...)."""


class BadPayload(AdapterError):
    """A payload that can't travel (no dict, a type msgpack lacks), or a body that holds no payload."""


class BadHandle(AdapterError):
    """A handle that points outside what its owner published, or at something that is no arena."""


class ArenaFull(AdapterError):
    """The arena is at its ceiling, or the shared-memory folder has no space left."""

    retryable = True


class Unreachable(AdapterError):
    """What should have a tensor's bytes, another host or a store, did not answer in time."""

    retryable = True


class Sink(Protocol):
    """Where a sender's tensors go. Thread-safe; ``put`` may be called from engine threads."""

    def put(self, tensor: Any) -> Handle:
        """Copies a NumPy array or torch tensor (on the CPU) once and says where it lies.

        Raises :class:`UnsupportedTensor` or :class:`ArenaFull`.
        """
        ...

    def free(self, block: BlockId) -> None:
        """Gives a block of our own back. Unknown or already freed blocks are ignored and counted."""
        ...

    def undo(self, block: BlockId) -> None:
        """Takes back a ``put`` of just now of which nobody has heard."""
        ...


class Transport(Sink, Protocol):
    """Moves tensors between processes by handle."""

    name: str

    def get(self, handle: Handle, released: Callable[[BlockId], None]) -> Any:
        """Returns a read-only zero-copy NumPy array (torch tensor for dtypes NumPy lacks).

        ``released`` is called exactly once, from any thread, when the last view of it is gone; until then
        the reader holds the block. It may run in the middle of anything (views die in garbage collections
        too), so it should take a note and leave; in particular it must not call :meth:`free`.
        Raises :class:`BadHandle`; then ``released`` is not called.
        """
        ...

    def close(self) -> None:
        """Unlinks our own segments (readers that still map them keep their view)."""
        ...
