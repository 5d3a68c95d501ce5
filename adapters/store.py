"""Stores: where tensors go that must outlive processes or a host, or that shared memory has no room for.

    store = open_store(text)          # a folder's path, or "mooncake://HOST:PORT?..."

There are two: a folder of files (:mod:`adapters.disk`), which survives a restart of its host and is out of
reach while that host is, and Mooncake's distributed memory (:mod:`adapters.mooncake`), which survives the
loss of a host. A handle names the transport that reads it: "disk" or "mooncake".

No NumPy here: the broker, which removes what is stored, never looks at a tensor.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, TypeVar

NAME = re.compile(r"[0-9A-Za-z_-]{8,64}")  #: a request's name
THREADS = 4  #: of one process, at work only while something is written or read

T = TypeVar("T")


class Store(Protocol):
    """What every store can do. Thread-safe; everything may block, but for :meth:`on_thread`."""

    transport: str  #: what the handles of what lies here say
    text: str  #: what :func:`open_store` makes the same store of, in any process

    def put(self, name: str, data: memoryview) -> str:
        """Keeps a tensor's bytes for the request of this name, and returns their place, "NAME/...".

        Raises ValueError for a bad name, :class:`adapters.handle.ArenaFull` when there is no room, and other
        AdapterErrors when it can't be done. After an error nothing is left.
        """
        ...

    def read(self, place: str, nbytes: int) -> bytes:
        """The bytes that were put there, checked. Raises :class:`adapters.handle.BadHandle` when they aren't.

        Where the store is out of reach: :class:`adapters.handle.Unreachable`.
        """
        ...

    def has(self, place: str) -> bool:
        """Whether something lies there; it may be damaged."""
        ...

    def unlink(self, place: str) -> bool:
        """Removes one tensor. False: it was not there."""
        ...

    def discard(self, name: str) -> None:
        """Removes all of a request; none is fine. Raises ValueError for a bad name."""
        ...

    def sweep(self, keep: set[str]) -> list[str]:
        """Removes all requests but these. Returns the names of those that went, as far as they are known."""
        ...

    def leave(self) -> None:
        """Ends this process's part, whatever lies in it. Idempotent."""
        ...

    def close(self) -> None:
        """The broker's part ends: like :meth:`leave`, and an empty store goes."""
        ...

    async def on_thread(self, work: Callable[[], T], undo: Callable[[T], None]) -> T:
        """See :meth:`Beside.on_thread`."""
        ...


class Beside:
    """Work beside the event loop, for stores."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store")

    async def on_thread(self, work: Callable[[], T], undo: Callable[[T], None]) -> T:
        """Runs ``work`` beside the event loop. If we are cancelled meanwhile, its result goes to ``undo``.

        ``undo`` may run on any thread, also after the loop has ended.
        """
        future = self._threads.submit(work)

        def clean(done: Future[T]) -> None:
            if not done.cancelled() and done.exception() is None:
                undo(done.result())

        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(clean)
            raise
        finally:
            del future  # else an error's traceback and the future keep each other, and what `work` looked at


def open_store(text: str) -> Store:
    """The store of this name. Nothing is made or connected before it is first used.

    Raises ValueError for an address of Mooncake's that is none.
    """
    if text.startswith("mooncake://"):
        from adapters.mooncake import MooncakeStore
        from adapters.mooncake_client import Address

        return MooncakeStore(Address.parse(text))
    from adapters.disk import DiskStore

    return DiskStore(Path(text))


def check_name(name: str) -> str:
    """The name. Raises ValueError for one that no request has."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is no request's name: 8 to 64 letters, digits, _ and -")
    return name


def checksum(data: bytes | memoryview) -> bytes:
    """Of a tensor's bytes: 16 bytes (BLAKE2b)."""
    return blake2b(data, digest_size=16).digest()
