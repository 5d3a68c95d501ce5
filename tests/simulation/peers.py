"""What processes have in common; for engines and clients: an arena, and views of others' blocks."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from adapters.handle import BlockId, Chunk, Handle
from broker.protocol import Beat, Free, Message, Peer, Release
from broker.session import Session
from tests.simulation.graphs import pick
from tests.simulation.memory import Views

if TYPE_CHECKING:
    from tests.simulation.world import World


class Process:
    """A process with a connection to the broker."""

    def __init__(self, world: World, peer: Peer) -> None:
        self.world = world
        self.peer = peer
        self.alive = True
        self.heard = world.now  #: when nothing of it was under way
        self.suspected: float | None = None  #: since when the broker may rightly have given it up

    def send(self, message: Message) -> None:
        """Puts a message on the way to the broker."""
        self.world.up.put(self.peer, message)

    def beat(self, beat: Beat) -> None:
        """Says that we live. Where nothing is under way it arrives at once: steps are for other things."""
        queue = self.world.up[self.peer]
        if not queue and self.world.broker.up:
            self.world.broker.receive(self.peer, beat)
        elif not (queue and isinstance(queue[-1], Beat)):  # one that waits still says it too
            self.send(beat)

    def restart_connection(self) -> None:
        """Forgets what has not left yet, but for releases: the broker that it was for is dead."""
        rng, up = self.world.rng, self.world.up
        if rng.random() < 0.5:
            kept = pick(rng, len(up[self.peer]) + 1)
            releases = [m for m in list(up[self.peer])[kept:] if isinstance(m, Release)]
            up.lose_newest(self.peer, kept)
            for release in releases:
                self.send(release)

    def on(self, m: Message) -> None:
        """A message of the broker's has come."""
        raise NotImplementedError

    @property
    def doubtful(self) -> bool:
        """Whether the broker may rightly take it for dead."""
        return self.suspected is not None

    @property
    def has_work(self) -> bool:
        """Whether it may be able to do something by itself."""
        return False

    def can_step(self) -> bool:
        """Whether it can do something by itself."""
        return False

    def step(self, rng: random.Random) -> None:
        """It does something by itself, if it can."""

    def die(self) -> None:
        """The process is no more."""
        self.alive = False


class Producer(Process):
    """A process with an arena."""

    session: Session
    host = ""  #: the broker's

    def __init__(self, world: World, peer: Peer) -> None:
        super().__init__(world, peer)
        self.arena = ""
        self.arenas: list[str] = []
        self.views = Views(world.memory, peer)

    def open_arena(self) -> None:
        """A fresh one; another that we had stays until the broker removes it."""
        self.arena = self.world.memory.open_arena(self.host)
        self.arenas.append(self.arena)

    def chunk(self, seq: int, value: int, handles: list[Handle], *, last: bool) -> Chunk:
        """A chunk that says ``value``."""
        return Chunk(seq, last, msgspec.Raw(msgspec.msgpack.encode(value)), handles)

    def release(self, blocks: list[BlockId]) -> None:
        """We look at these no longer."""
        if blocks:
            self.session.released(blocks)
            self.send(Release(blocks))

    def freed(self, m: Free) -> None:
        """The broker gives blocks back."""
        self.session.freed(m.blocks)
        for block in m.blocks:
            self.world.memory.free(block)

    def die(self) -> None:
        super().die()
        self.views.die()


def value_of(chunk: Chunk) -> int:
    """What a chunk says."""
    value: int = msgspec.msgpack.decode(chunk.body)
    return value
