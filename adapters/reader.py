"""The reading side: from a handle out of a message to a view, checked on the way.

What lies in shared memory is mapped; what lies in the store is read. A handle may come from a hostile or
confused peer. Nothing of it is believed before it is checked against the file itself: name, type, owner,
mode, bounds, and the header in front of the block.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from adapters import tensor
from adapters.handle import STORES, BadHandle, BlockId, Handle, Landed
from adapters.segment import HEADER, HEADER_SIZE, MAGIC, SEGMENT
from adapters.store import Store

KEPT = 64  #: mappings kept although no view uses them


class Reader:
    """Maps other processes' segments, each once. Thread-safe.

    A mapping lives as long as a view of it, and beyond that while it is among the last ``kept`` used and its
    file still exists. It holds one file descriptor.
    """

    def __init__(self, folder: Path, *, kept: int = KEPT, store: Store | None = None) -> None:
        self.folder = folder
        self.store = store
        self._kept = kept
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[str, mmap.mmap] = weakref.WeakValueDictionary()

    @property
    def mappings(self) -> int:
        """How many segments are mapped now."""
        return len(self._alive)

    def get(self, handle: Handle, released: Callable[[BlockId], None]) -> Any:
        """A read-only view; see :meth:`adapters.handle.Transport.get`.

        For what has landed, ``released`` isn't called: its block has gone back already.

        What lies on disk is read here and now, two milliseconds a MiB, most of them for the checksum. It lies
        there because memory was full or the machine was restarted: too rare to read it on another thread.
        What lies in Mooncake may take long, so whoever has an event loop lets it land first
        (:mod:`adapters.net.landing`).
        """
        kind = tensor.storage(handle.dtype, handle.shape, handle.nbytes)
        memory: mmap.mmap | bytes
        if isinstance(handle, Landed):
            return tensor.revive(_landed(handle, kind), handle.dtype)
        if handle.transport in STORES:
            memory, offset = self._stored(handle.block.place, handle.nbytes), 0
        elif handle.transport == "shm":
            try:
                memory, offset = self._mapped(handle), handle.block.offset
            except BadHandle:  # gone, cut, or another's by now
                if not handle.copy:
                    raise
                memory, offset = self._stored(handle.copy, handle.nbytes), 0
        else:
            raise BadHandle(f"unknown transport {handle.transport[:40]!r}")
        # NumPy keeps this array alive for every view made of it, because its own base is no array.
        root = tensor.over(memory, offset, kind, handle.shape)
        result = tensor.revive(root, handle.dtype)
        weakref.finalize(root, released, handle.block).atexit = False
        return result

    def view(self, handle: Handle) -> memoryview:
        """The bytes of a block in shared memory, checked as :meth:`get` does, for who sends them on.

        Raises :class:`BadHandle`.
        """
        tensor.storage(handle.dtype, handle.shape, handle.nbytes)
        start = handle.block.offset
        return memoryview(self._mapped(handle))[start : start + handle.nbytes]

    def forget(self) -> None:
        """Drops the mappings that no view uses."""
        with self._lock:
            self._recent.clear()

    def trim(self) -> None:
        """Drops the mappings whose files are gone, so that their memory can be."""
        with self._lock:
            self._trim()

    def _trim(self) -> None:
        for place in [place for place in self._recent if not (self.folder / place).exists()]:
            del self._recent[place]

    def _stored(self, place: str, nbytes: int) -> bytes:
        if self.store is None:
            raise BadHandle(f"{place[:120]!r} lies in a store, and this process has none")
        return self.store.read(place, nbytes) or b"\0"  # NumPy wants a byte, also for no element

    def _mapped(self, handle: Handle) -> mmap.mmap:
        """The memory with a handle's block in it."""
        block, nbytes = handle.block, handle.nbytes
        memory = self._mapping(block.place)
        # The file's size now, not when we mapped it: a file that somebody cut gives an error, not SIGBUS.
        if not HEADER_SIZE <= block.offset <= memory.size() - nbytes or block.offset + nbytes > len(memory):
            raise BadHandle(f"block at {block.offset} with {nbytes} bytes lies outside {block.place}")
        if HEADER.unpack_from(memory, block.offset - HEADER_SIZE) != (MAGIC, block.generation, nbytes):
            raise BadHandle(
                f"block at {block.offset} of {block.place} is not of generation {block.generation}"
            )
        return memory

    def _mapping(self, place: str) -> mmap.mmap:
        with self._lock:
            memory = self._recent.get(place)
            if memory is None:
                memory = self._alive.get(place)
                if memory is None:
                    self._trim()
                    memory = self._alive[place] = self._map(place)
                self._recent[place] = memory
                if len(self._recent) > self._kept:
                    self._recent.popitem(last=False)
            else:
                self._recent.move_to_end(place)
            return memory

    def _map(self, place: str) -> mmap.mmap:
        if not SEGMENT.fullmatch(place):
            raise BadHandle(f"{place[:80]!r} is no segment's name")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(self.folder / place, flags)
        except FileNotFoundError:
            raise BadHandle(f"{place} is gone") from None
        except OSError as error:
            raise BadHandle(f"can't open {place}: {error.strerror}") from None
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
                raise BadHandle(f"{place} is no private file of ours")
            if info.st_size < HEADER_SIZE:
                raise BadHandle(f"{place} is empty")
            return mmap.mmap(fd, info.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise BadHandle(f"can't map {place}: {error.strerror}") from None
        finally:
            os.close(fd)


def _landed(handle: Landed, kind: np.dtype[Any]) -> tensor.Array:
    array = tensor.over(handle.data or b"\0", 0, kind, handle.shape)
    array.flags.writeable = False
    return array
