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

from adapters.disk import DiskStore
from adapters.handle import LANDED, BlockId, Chunk, Handle, Landed, Unreachable
from adapters.host import host_of
from adapters.net.fetch import Fetcher


class Landing:
    """Where chunks of other hosts come down.

    Args:
        host: Ours, as :func:`adapters.host.this_host` gives it.
        fetcher: What pulls; None where the run has one host only.
        store: The disk store of this process, whose files need no landing.
    """

    def __init__(self, host: str, fetcher: Fetcher | None, *, store: DiskStore | None = None) -> None:
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
        :meth:`adapters.net.fetch.Fetcher.fetch` does.
        """
        waiting = {index: handle.block for index, handle in enumerate(chunk.handles)}

        async def one(index: int, handle: Handle) -> Handle:
            if not self._is_foreign(handle):
                return handle
            if self.fetcher is None:
                raise Unreachable(f"{handle.block.place} lies on another host, and this process fetches none")
            data = await self.fetcher.fetch(handle, transport)
            released(waiting.pop(index))
            return landed(handle, data)

        tasks = [asyncio.ensure_future(one(index, handle)) for index, handle in enumerate(chunk.handles)]
        try:
            handles = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for block in waiting.values():
                released(block)
            raise
        return msgspec.structs.replace(chunk, handles=list(handles))

    def _is_foreign(self, handle: Handle) -> bool:
        if host_of(handle.block.place) in ("", self.host):
            return False
        # It may be in our own store: the block was in our memory, before this machine was restarted.
        return self._store is None or not self._store.has(handle.file)


def landed(handle: Handle, data: Any) -> Landed:
    """The same tensor, its bytes here."""
    return Landed("landed", LANDED, handle.nbytes, handle.dtype, handle.shape, data=data)
