"""A client's shared memory: the arena that it lends tensors from, and those of lives that are over.

No wire: whoever owns this tells the broker, and hears from it when blocks come back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from adapters.arena import SharedMemory
from adapters.chunk import Chunk, Payload, pack_wait, unpack
from adapters.handle import BlockId
from adapters.store import Store, open_store
from adapters.sweep import sweep
from pipelines.graph import Pipeline


class Lending:
    """What a client has lent. Nothing works before the first :meth:`begin`."""

    def __init__(self) -> None:
        self.run = ""  #: whose arena it is; "": there is none yet
        self._arena: SharedMemory
        self._store: Store | None = None
        self._old: list[SharedMemory] = []  #: the broker gave us up, and reaps them itself

    @property
    def prefix(self) -> str:
        """The arena's, for the broker; "" without one."""
        return self._arena.prefix if self.run else ""

    def begin(self, run: str, store: str) -> None:
        """A fresh arena of a run, with this store (see :func:`adapters.store.open_store`; "": none).

        What was lent from the one before is a dead run's, or the broker removes it when nobody needs it.
        """
        if self.run and self.run != run:
            self._arena.close()
        elif self.run:
            self._old.append(self._arena)
        self.run = run
        if self._store is not None and self._store.text != store:
            self._store.leave()
            self._store = None
        if self._store is None and store:
            self._store = open_store(store)
        self._arena = SharedMemory(run, store=self._store)

    async def pack(
        self, given: dict[str, list[Payload]], name: str, pipeline: Pipeline | None
    ) -> dict[str, list[Chunk]]:
        """What a request is given, producer by producer, ready to travel.

        Args:
            given: Producer -> its whole output.
            name: The request's.
            pipeline: Says which producers' tensors are in the store, too or only. None: it is unknown.

        Raises AdapterError. After an error, or a cancellation, nothing of it is left.
        """
        arena = self._arena
        packed: dict[str, list[Chunk]] = {}
        try:
            for producer, payloads in given.items():
                chunks = packed[producer] = []
                kept = pipeline.kept(producer) if pipeline is not None and arena.store is not None else {}
                for seq, payload in enumerate(payloads):
                    last = seq == len(payloads) - 1
                    chunks.append(await pack_wait(payload, seq, arena, last=last, name=name, **kept))
        except BaseException:
            for chunk in itertools.chain.from_iterable(packed.values()):
                _take_back(chunk, arena)
            raise
        return packed

    def unpack(self, chunk: Chunk, released: Callable[[BlockId], None]) -> Payload:
        """A chunk's payload; see :func:`adapters.chunk.unpack`."""
        return unpack(chunk, self._arena, released)

    def free(self, blocks: Iterable[BlockId]) -> None:
        """The broker gives these back."""
        for block in blocks if self.run else ():
            self._arena.free(block)

    def leave(self) -> None:
        """Ends our part: what others need stays, unless there is no broker any more to remove it."""
        arenas = [*self._old, self._arena] if self.run else []
        stays = [arena.leave() for arena in arenas]
        if any(stays):
            sweep()
        if self._store is not None:
            self._store.leave()


def _take_back(chunk: Chunk, arena: SharedMemory) -> None:
    """Frees what a chunk of ours names that has gone nowhere."""
    for handle in chunk.handles:
        arena.free(handle.block)
        if handle.copy and arena.store is not None:
            arena.store.unlink(handle.copy)
