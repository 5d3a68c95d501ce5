"""Chunks whose tensors lie on another host, brought to this one.

    if landing.foreign(chunk):
        chunk = await landing.land(chunk, released)

A handle that has landed carries its bytes itself, so they live exactly as long as the chunk, or a view of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from adapters.handle import LANDED, BadHandle, BlockId, Chunk, Handle, Landed, Unreachable
from adapters.host import host_of
from adapters.net.fetch import Fetcher
from adapters.store import Store

COPY_AFTER_S = 3.0  #: a block with a copy in Mooncake is waited for so long, and for its bytes at
SLOWEST = 20e6  #: so many a second


class Landing:
    """Where chunks of other hosts come down.

    Args:
        host: Ours, as :func:`adapters.host.this_host` gives it.
        fetcher: What pulls; None where the run has one host only.
        store: This process's. A disk store's files need no landing; what lies in Mooncake comes from there.
    """

    def __init__(self, host: str, fetcher: Fetcher | None, *, store: Store | None = None) -> None:
        self.host = host
        self.fetcher = fetcher
        self._store = store

    def foreign(self, chunk: Chunk) -> bool:
        """Whether a tensor of the chunk lies on another host."""
        return any(map(self._is_foreign, chunk.handles))

    async def land(self, chunk: Chunk, released: Callable[[BlockId], None], transport: str = "auto") -> Chunk:
        """The chunk with all its tensors here.

        ``released`` is called for each foreign block as soon as its bytes are here, and for all blocks of the
        chunk if this raises or is cancelled; in either case once for each. Raises what
        :meth:`adapters.net.fetch.Fetcher.fetch` and :meth:`adapters.store.Store.read` do.
        """
        waiting = {index: handle.block for index, handle in enumerate(chunk.handles)}

        async def one(index: int, handle: Handle) -> Handle:
            if not self._is_foreign(handle):
                return handle
            data = await self._bytes(handle, "auto" if transport == "mooncake" else transport)
            released(waiting.pop(index))
            return landed(handle, data)

        tasks: list[asyncio.Future[Handle]] = [
            asyncio.ensure_future(one(index, handle)) for index, handle in enumerate(chunk.handles)
        ]
        try:
            handles = await asyncio.gather(*tasks)
        except BaseException:
            await _end(tasks)
            for block in waiting.values():
                released(block)
            raise
        finally:
            # An error's traceback holds this frame, and a task its error: what landed beside it would stay.
            tasks.clear()
        return msgspec.structs.replace(chunk, handles=list(handles))

    async def _bytes(self, handle: Handle, transport: str) -> Any:
        if handle.transport == "mooncake":
            return await self._stored(handle.block.place, handle.nbytes)
        copied = bool(handle.copy) and self._store is not None and self._store.transport == "mooncake"
        if self.fetcher is None:
            if not copied:
                raise Unreachable(f"{handle.block.place} lies on another host, and this process fetches none")
        elif not copied or host_of(handle.block.place) in self.fetcher.book:
            try:
                async with asyncio.timeout(COPY_AFTER_S + handle.nbytes / SLOWEST if copied else None):
                    return await self.fetcher.fetch(handle, transport)
            except (TimeoutError, BadHandle, Unreachable):
                if not copied:
                    raise
        return await self._stored(handle.copy, handle.nbytes)

    async def _stored(self, place: str, nbytes: int) -> bytes:
        store = self._store
        if store is None:
            raise BadHandle(f"{place[:120]!r} lies in Mooncake, and this process has none")
        data = await store.on_thread(lambda: store.read(place, nbytes), lambda data: None)
        if self.fetcher is not None:
            self.fetcher.carried.add(store.transport, "Mooncake", nbytes)
        return data

    def _is_foreign(self, handle: Handle) -> bool:
        if handle.transport == "mooncake":
            return True
        if host_of(handle.block.place) in ("", self.host):
            return False
        # It may be in our own store: the block was in our memory, before this machine was restarted.
        store = self._store
        return store is None or store.transport != "disk" or not store.has(handle.file)


async def _end(tasks: list[asyncio.Future[Handle]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def landed(handle: Handle, data: Any) -> Landed:
    """The same tensor, its bytes here."""
    return Landed("landed", LANDED, handle.nbytes, handle.dtype, handle.shape, data=data)
