"""A guardian: starts an engine, beats for it, reports its death, starts another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapters.host import host_of
from broker.protocol import (
    VERSION,
    Beat,
    Died,
    Hello,
    Kill,
    Left,
    Message,
    Peer,
    Sweep,
    Unlink,
    Welcome,
    Who,
)
from broker.session import Session
from tests.simulation.engines import Engine
from tests.simulation.peers import Process

if TYPE_CHECKING:
    from tests.simulation.world import World


PATIENCE_S = 10.0


class Guardian(Process):
    """The guardian of one worker of a stage."""

    def __init__(self, world: World, peer: Peer, stage: str, host: str) -> None:
        super().__init__(world, peer)
        self.stage = stage
        self.host = host  #: "": the broker's
        self.engine: Engine | None = None
        self.session = Session()
        self.impatient = world.now + PATIENCE_S  #: when it ends, unless it has been welcomed
        self._hello()

    def _hello(self) -> None:
        where = (self.host, "", ["zmq://there"]) if self.host else (self.world.HOST, "", [])
        self.send(Hello(VERSION, "", self.stage, "h", 1, "cpu", *where))

    @property
    def welcomed(self) -> bool:
        """Whether any broker has answered."""
        return self.session.boot > 0

    def say_beat(self) -> None:
        """Due now and then."""
        if self.welcomed:
            self.beat(Beat([self.engine.peer] if self.engine else []))

    def start_engine(self) -> None:
        """Its model has loaded."""
        self.engine = Engine(self.world, self.world.new_peer(b"w"), self)
        self.world.processes[self.engine.peer] = self.engine

    def on(self, m: Message) -> None:
        if isinstance(m, Welcome):
            self.session.met(m.boot)
        elif isinstance(m, Who):
            self._on_who(m)
        elif isinstance(m, Kill) and self.engine is not None and self.engine.peer == m.worker:
            self.kill_engine(m.cause)
        elif isinstance(m, Sweep):
            memory = self.world.memory
            arenas = memory.dead(self.host, self.world.living_arenas())
            self.send(Left(arenas, memory.folders(self.host)))
        elif isinstance(m, Unlink):
            self._on_unlink(m)

    def _on_unlink(self, m: Unlink) -> None:
        assert self.host, "the broker removes what is on its own host"
        for arena in m.arenas:
            assert host_of(arena) == self.host, f"{arena} is on another host"
            self.world.memory.reap(arena)
        for name in m.names:
            self.world.memory.discard(name, self.host)

    def _on_who(self, m: Who) -> None:
        act = self.session.introduce(m)
        if act == "ignore":
            return
        if act == "gone" and self.engine is not None and self.engine.alive:
            self.world.kill(self.engine)  # its end is reported when it has been noticed
        self._hello()

    def kill_engine(self, cause: str) -> None:
        """SIGKILL."""
        engine, self.engine = self.engine, None
        if engine is not None:
            if engine.alive:
                self.world.kill(engine)
            self.send(Died(engine.peer, cause))

    def engine_died(self, cause: str) -> None:
        """It did so by itself, and we have noticed."""
        assert self.engine is not None
        self.send(Died(self.engine.peer, cause))
        self.engine = None

    def die(self) -> None:
        super().die()
        if self.engine is not None and self.engine.alive:  # it dies with its parent
            self.world.kill(self.engine)
            self.engine = None
