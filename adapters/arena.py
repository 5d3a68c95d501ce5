"""Tensors in shared memory: the transport between processes of one machine.

    with SharedMemory(run) as arena:
        handle = arena.put(tensor)                      # one copy
        view = other_process.get(handle, released)      # no copy
        arena.free(handle.block)                        # when the broker says so

Each producing process owns one arena: segments (:mod:`adapters.segment`) that are made when they are needed,
each about twice as large as the last, up to a ceiling. At the ceiling ``put`` raises :class:`ArenaFull` and
the producer may wait for a block to come back, or turn to a store (:mod:`adapters.store`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from adapters import tensor as codec
from adapters.handle import AdapterError, ArenaFull, BlockId, Handle
from adapters.host import new_owner
from adapters.reader import Reader
from adapters.room import ceiling as usual_ceiling
from adapters.segment import OWNER, RUN, Segment, block_size, shm_dir
from adapters.store import Store

MIB = 1 << 20
FIRST_SEGMENT = 8 * MIB  #: a container's /dev/shm has 64 MiB, and each producer wants some of it
LARGEST_SEGMENT = 256 * MIB  #: a larger tensor gets a segment of its own

_PAGE = 4096


class Usage(NamedTuple):
    """What an arena holds now."""

    segments: int
    bytes: int  #: in segments
    blocks: int
    used: int  #: bytes in blocks, headers included
    stale_frees: int  #: frees of unknown or already freed blocks so far


class SharedMemory:
    """The shared-memory transport of one process: its own arena, and views of everyone's. Thread-safe."""

    name = "shm"

    def __init__(
        self,
        run: str,
        *,
        owner: str | None = None,
        folder: Path | None = None,
        ceiling: int | None = None,
        first_segment: int = FIRST_SEGMENT,
        store: Store | None = None,
    ) -> None:
        """Makes no file yet.

        Args:
            run: The broker run's nonce, 16 hex digits.
            owner: 8 to 32 hex digits; by default they begin with the host's name, see :mod:`adapters.host`.
            folder: Where segments live; by default ``OMNI_SHM_DIR`` or /dev/shm.
            ceiling: Bytes that all segments together may take; by default see :func:`adapters.room.ceiling`.
            first_segment: Bytes of the first segment.
            store: Where tensors go that have to outlive us or have no room, and where such are read.
        """
        self.folder = folder or shm_dir()
        owner = owner or new_owner(self.folder)
        if not RUN.fullmatch(run) or not OWNER.fullmatch(owner):
            raise ValueError(f"run {run!r} or owner {owner!r} is not made of hex digits (16, and 8 to 32)")
        self.prefix = f"omni-{run}-{owner}-"  #: how the names of our segments start
        self.ceiling = usual_ceiling(self.folder) if ceiling is None else ceiling
        self.store = store
        self.reader = Reader(self.folder, store=store)
        self._numbers = itertools.count()
        self._next_size = first_segment
        self._lock = threading.Lock()
        self._segments: dict[str, Segment] = {}
        self._frees = 0
        self._stale_frees = 0
        self._on_free: list[Callable[[], None]] = []
        self._closed = False
        _arenas.add(self)

    # --- Transport

    def put(self, tensor: Any) -> Handle:
        """Copies a tensor into the arena, once. See :meth:`adapters.handle.Transport.put`.

        :class:`ArenaFull` is retryable unless the tensor is larger than the ceiling.
        """
        array, dtype = codec.plain(tensor)
        segment, offset, generation = self._take(array.nbytes)
        block = BlockId(segment.path.name, offset, generation)
        try:
            place = np.ndarray(array.shape, array.dtype, segment.memory, offset)
        except ValueError:  # the mapping was closed under us
            raise AdapterError("the arena is closed") from None
        np.copyto(place, array)
        return Handle(self.name, block, array.nbytes, dtype, array.shape)

    def get(self, handle: Handle, released: Callable[[BlockId], None]) -> Any:
        """A read-only view of anybody's tensor. See :meth:`adapters.handle.Transport.get`.

        A torch tensor made of the view can't know that it is read-only: writing to it in place kills the
        process, so clone first.
        """
        return self.reader.get(handle, released)

    def free(self, block: BlockId) -> None:
        """Gives one of our blocks back; a block that isn't in use in this generation is counted, no more.

        A block in the store goes from there.
        """
        if "/" in block.place:  # no segment's name has one
            if self.store is None or not self.store.unlink(block.place):
                with self._lock:
                    self._stale_frees += 1
            return
        with self._lock:
            segment = self._segments.get(block.place)
            if segment is None or not segment.give_back(block.offset, block.generation):
                self._stale_frees += 1
                return
            self._frees += 1
            waiting, self._on_free = self._on_free, []
        for wake in waiting:
            wake()

    def undo(self, block: BlockId) -> None:
        """Gives a block back that was just put and that nobody has heard of.

        Wakes nobody: there is as much room as before. Else a chunk that fits only in part would wake who
        waits for room for it, its own packer before all, to try again at once, and again.
        """
        with self._lock:
            segment = self._segments.get(block.place)
            if segment is not None:
                segment.give_back(block.offset, block.generation)

    def close(self) -> None:
        """Unlinks our segments. Idempotent. Readers that have mapped them keep their views."""
        with self._lock:
            segments, self._segments = self._segments, {}
            self._closed = True
            waiting, self._on_free = self._on_free, []
        for segment in segments.values():
            segment.discard()
        for wake in waiting:
            wake()
        self.reader.forget()

    def leave(self) -> bool:
        """Ends our part without taking away what others may still need. Idempotent.

        Segments with blocks in use stay, as those of a dead process do: whoever counts the blocks unlinks
        them after the last. All others go. Whether any stays.
        """
        with self._lock:
            self._closed = True
            used = {name: segment for name, segment in self._segments.items() if segment.blocks}
            for name in used:
                del self._segments[name]
        for segment in used.values():
            segment.let_go()
        self.close()
        return bool(used)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- backpressure

    @property
    def frees(self) -> int:
        """How many blocks were given back so far; what the two methods below compare with."""
        return self._frees

    def wait_freed(self, since: int, timeout_s: float) -> bool:
        """Blocks until there were more frees than ``since``; False when the time is over (or we closed)."""
        event = threading.Event()
        with self._woken(since, event.set) as already:
            return already or (event.wait(timeout_s) and not self._closed)

    async def freed(self, since: int, timeout_s: float) -> bool:
        """Like :meth:`wait_freed`, for an event loop."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

        with self._woken(since, wake) as already:
            if already:
                return True
            try:
                async with asyncio.timeout(timeout_s):
                    await event.wait()
            except TimeoutError:
                return False
            return not self._closed

    @contextmanager
    def _woken(self, since: int, wake: Callable[[], None]) -> Iterator[bool]:
        """Has ``wake`` called at the next free, or gives True if that has already been."""
        with self._lock:
            already = self._frees > since
            if not already:
                self._on_free.append(wake)
        try:
            yield already
        finally:
            with self._lock:
                if wake in self._on_free:
                    self._on_free.remove(wake)

    def usage(self) -> Usage:
        """Figures for metrics."""
        with self._lock:
            segments = list(self._segments.values())
            return Usage(
                len(segments),
                sum(segment.size for segment in segments),
                sum(segment.blocks for segment in segments),
                sum(segment.room.used for segment in segments),
                self._stale_frees,
            )

    # --- growing

    def _take(self, nbytes: int) -> tuple[Segment, int, int]:
        need = block_size(nbytes)
        with self._lock:
            if self._closed:
                raise AdapterError("the arena is closed")
            for segment in self._segments.values():
                if need <= segment.room.largest and (block := segment.take(nbytes)) is not None:
                    return segment, *block
            segment = self._grow(need)
            block = segment.take(nbytes)
            assert block is not None
            return segment, *block

    def _grow(self, need: int) -> Segment:
        need = -(-need // _PAGE) * _PAGE
        if need > self.ceiling:
            error = ArenaFull(
                f"a tensor of {need:,} bytes exceeds the arena's ceiling of {self.ceiling:,}; see OMNI_SHM_MB"
            )
            error.retryable = False
            raise error
        size = max(need, min(self._next_size, self._left()))
        if size > self._left():
            self._shrink()  # empty segments that are too small stand in the way
            size = max(need, min(self._next_size, self._left()))
        if size > self._left():
            raise ArenaFull(f"the arena holds {self.ceiling - self._left():,} of {self.ceiling:,} bytes")
        try:
            segment = self._make(size)
        except ArenaFull:
            self._shrink()
            segment = self._make(need)
        else:
            self._next_size = min(self._next_size * 2, LARGEST_SEGMENT)
        self._segments[segment.path.name] = segment
        return segment

    def _make(self, size: int) -> Segment:
        while True:
            path = self.folder / f"{self.prefix}{next(self._numbers)}"
            try:
                return Segment(path, size)
            except FileNotFoundError:
                if not self.folder.is_dir():
                    raise AdapterError(f"no shared-memory folder {self.folder}; see OMNI_SHM_DIR") from None
                # else a sweeper took the file before we had locked it: another name
            except OSError as error:
                raise AdapterError(f"can't make a segment in {self.folder}: {error.strerror}") from error

    def _left(self) -> int:
        left = self.ceiling - sum(segment.size for segment in self._segments.values())
        return left // _PAGE * _PAGE

    def _shrink(self) -> None:
        for name in [name for name, segment in self._segments.items() if not segment.blocks]:
            self._segments.pop(name).discard()

    # --- fork

    def _forked(self) -> None:
        """In a forked child: the arena is the parent's, we must neither use it nor keep its locks."""
        for segment in self._segments.values():
            segment.unlock()
        self._segments = {}
        self._closed = True
        self._on_free = []
        # Another thread of the parent may have held a lock just then.
        self._lock = threading.Lock()
        self.reader = Reader(self.folder, store=self.store)


_arenas: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


def _forget_parents_arenas() -> None:
    for arena in list(_arenas):
        arena._forked()


os.register_at_fork(after_in_child=_forget_parents_arenas)
