"""A guardian: starts an engine, beats for it, reports its death, starts another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.protocol import VERSION, Beat, Died, Hello, Kill, Message, Peer, Welcome, Who
from tests.simulation.engines import Engine
from tests.simulation.peers import Process

if TYPE_CHECKING:
    from tests.simulation.world import World


class Guardian(Process):
    """The guardian of one worker of a stage."""

    def __init__(self, world: World, peer: Peer, stage: str) -> None:
        super().__init__(world, peer)
        self.stage = stage
        self.engine: Engine | None = None
        self.boot = 0  #: of the broker that has welcomed us last
        self.leaving = False
        self._hello()

    def _hello(self) -> None:
        self.send(Hello(VERSION, "", self.stage, "h", 1))

    def say_beat(self) -> None:
        """Due now and then."""
        self.beat(Beat([self.engine.peer] if self.engine else []))

    def start_engine(self) -> None:
        """Its model has loaded."""
        self.engine = Engine(self.world, self.world.new_peer(b"w"), self)
        self.world.processes[self.engine.peer] = self.engine

    def on(self, m: Message) -> None:
        if isinstance(m, Welcome):
            self.boot = m.boot
        elif isinstance(m, Who):
            if m.gone and self.engine is not None:
                self.kill_engine("the broker has given it up")
            self._hello()
        elif isinstance(m, Kill) and self.engine is not None and self.engine.peer == m.worker:
            self.kill_engine(m.cause)

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
