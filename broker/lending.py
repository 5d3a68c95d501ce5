"""A client's shared memory: the arena that it lends tensors from, and those of lives that are over.

No wire to the broker: whoever owns this tells it, and hears from it when blocks come back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from adapters.arena import SharedMemory
from adapters.chunk import Chunk, Payload, pack_wait, unpack
from adapters.handle import AdapterError, BadHandle, BadPayload, BlockId, Unreachable
from adapters.store import Store, open_store
from adapters.sweep import sweep
from broker.abroad import Abroad
from broker.address import AddressError
from broker.protocol import VERSION, Connect, Connected, Error, Hosts
from broker.serving import Serving, store_here
from broker.wire import MOST_BODY
from pipelines.graph import Pipeline


class Lending:
    """What a client has lent. Nothing works before the first :meth:`begin`.

    Args:
        kind: The client's. A gateway serves other hosts from the start, what an earlier one has lent too; all
            others as soon as they lend something.
        data_address: Where, see :func:`broker.serving.data_address`.
    """

    def __init__(self, kind: str, data_address: str | None) -> None:
        self.run = ""  #: whose arena it is; "": there is none yet
        self._kind = kind
        self._serving = Serving(data_address)
        self._told: list[str] = []
        self._abroad: Abroad
        self._arena: SharedMemory
        self._store: Store | None = None
        self._away = False  #: the store is this host's, and the broker is on another
        self._old: list[SharedMemory] = []  #: the broker gave us up, and reaps them itself

    @property
    def prefix(self) -> str:
        """The arena's, for the broker; "" without one."""
        return self._arena.prefix if self.run else ""

    def connect(self, *, arena: bool = False, met: int = 0) -> Connect:
        """Who we are, for the broker; with ``arena`` also where our memory is."""
        serving, prefix = self._serving, self.prefix if arena else ""
        self._told = serving.data
        return Connect(VERSION, self._kind, prefix, met, serving.host, serving.store_host, serving.data)

    def begin(self, broker: Connected) -> None:
        """A fresh arena for the run of a broker that has answered.

        What was lent from the one before is a dead run's, or the broker removes it when nobody needs it.
        Raises AdapterError where it has to serve other hosts and can't.
        """
        run, store = broker.run, store_here(broker.store, broker.shm_host, broker.run)
        if self.run:
            self._abroad.close()
        if self.run and self.run != run:
            self._arena.close()
        elif self.run:
            self._old.append(self._arena)
        self.run = run
        if self._store is not None and self._store.text != store:
            self._leave_store()
        self._away = store != broker.store
        if self._store is None and store:
            self._store = open_store(store)
        self._arena = SharedMemory(run, store=self._store)
        self._abroad = Abroad(run, self._arena)
        if self._kind == "gateway" or self._serving.data:
            self._serve()

    def look(self) -> None:
        """Due now and then, see :meth:`broker.serving.Serving.look`."""
        self._serving.look()

    @property
    def untold(self) -> bool:
        """Whether the broker has yet to hear where what is lent can be read; :meth:`connect` says so."""
        return self._serving.data != self._told

    def _serve(self) -> None:
        """Makes sure that what is lent can be read on other hosts."""
        try:
            self._serving.begin(self.run, self._store)
        except AddressError as error:
            raise AdapterError(str(error)) from None

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
                    if chunks[-1].handles:
                        self._serve()
            size = sum(len(chunk.body) for chunk in itertools.chain.from_iterable(packed.values()))
            if size > MOST_BODY:
                raise BadPayload(
                    f"{size >> 20} MiB besides large tensors; a request has {MOST_BODY >> 20} at most"
                )
        except BaseException:
            for chunk in itertools.chain.from_iterable(packed.values()):
                _take_back(chunk, arena)
            raise
        return packed

    def unpack(self, chunk: Chunk, released: Callable[[BlockId], None]) -> Payload:
        """A chunk's payload; see :func:`adapters.chunk.unpack`."""
        return unpack(chunk, self._arena, released)

    def learn(self, message: Hosts) -> None:
        """The broker says where others' memory can be read."""
        if self.run:
            self._abroad.learn(message)

    async def land(self, chunk: Chunk) -> tuple[Chunk, list[BlockId]]:
        """A chunk with its tensors here, and the blocks on other hosts that it needs no longer.

        Raises AdapterError or AddressError; then it still needs all of them.
        """
        if not self._abroad.foreign(chunk):
            return chunk, []
        gone: list[BlockId] = []
        return await self._abroad.land(chunk, gone.append), gone

    def free(self, blocks: Iterable[BlockId]) -> None:
        """The broker gives these back."""
        for block in blocks if self.run else ():
            self._arena.free(block)

    def leave(self) -> None:
        """Ends our part: what others need stays, unless there is no broker any more to remove it."""
        self._serving.close()
        if self.run:
            self._abroad.close()
        arenas = [*self._old, self._arena] if self.run else []
        stays = [arena.leave() for arena in arenas]
        if any(stays):
            sweep()
        self._leave_store()

    def _leave_store(self) -> None:
        """The broker's stays as it is; one of our host's goes, if nothing is in it."""
        if self._store is not None and self._away:
            self._store.close()
        elif self._store is not None:
            self._store.leave()
        self._store = None


def _take_back(chunk: Chunk, arena: SharedMemory) -> None:
    """Frees what a chunk of ours names that has gone nowhere."""
    for handle in chunk.handles:
        arena.free(handle.block)
        if handle.copy and arena.store is not None:
            arena.store.unlink(handle.copy)


def unread(error: Exception) -> Error:
    """What a caller is told of an output that can't be read. The same request made anew may well succeed."""
    message = f"an output can't be read: {error}"
    if isinstance(error, Unreachable):
        return Error("unreachable", message, 503, retry_after_s=1.0)
    if isinstance(error, BadHandle):
        return Error("output_lost", message, 503, retry_after_s=1.0)
    return Error("bad_output", message)
