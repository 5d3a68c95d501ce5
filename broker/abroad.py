"""What lies on other hosts, for an engine or a client: its way into this process's memory."""

from __future__ import annotations

from collections.abc import Callable

from adapters.arena import SharedMemory
from adapters.handle import BlockId, Chunk, blocks_of
from adapters.host import this_host
from adapters.net.landing import Landing
from broker.protocol import Hosts


class Abroad:
    """Brings chunks here. Opens nothing before the first one lies elsewhere.

    Args:
        run: The broker run's nonce.
        arena: This process's, which says where "here" is.
    """

    def __init__(self, run: str, arena: SharedMemory) -> None:
        self._run = run
        self._book: dict[str, list[str]] = {}
        self._landing = Landing(this_host(arena.folder), None, store=arena.store)
        self.foreign = self._landing.foreign  #: whether a tensor of a chunk lies on another host

    def learn(self, message: Hosts) -> None:
        """The broker says where others' memory can be read."""
        self._book = message.book
        if self._landing.fetcher is not None:
            self._landing.fetcher.book = message.book

    async def land(self, chunk: Chunk, released: Callable[[BlockId], None], transport: str = "auto") -> Chunk:
        """The chunk with its tensors here; see :meth:`adapters.net.landing.Landing.land`.

        Raises :class:`broker.keys.KeysError` for keys that can't be used; its blocks are released then, too.
        """
        if self._landing.fetcher is None:
            from adapters.net.fetch import Fetcher  # not at the head: on one host nobody needs these
            from broker.keys import Shared

            try:
                self._landing.fetcher = Fetcher(self._run, secure=Shared.find())
            except Exception:
                for block in blocks_of(chunk):
                    released(block)
                raise
            self._landing.fetcher.book = self._book
        return await self._landing.land(chunk, released, transport)

    def close(self) -> None:
        """Ends all connections; nothing may be landing any more."""
        if self._landing.fetcher is not None:
            self._landing.fetcher.close()
            self._landing.fetcher = None
