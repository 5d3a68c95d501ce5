"""A seeded world around the core: random graphs, workers that die, callers that leave, links with delay.

Every link keeps its order, but links run at random speeds against each other, and what a process had sent
may be lost with it. All randomness comes from one seed, so a failing seed replays.
"""

from __future__ import annotations

import random
from typing import TypeVar

from broker.core.events import Event, Reap, Received, Send, Tick
from broker.core.machine import Core
from broker.protocol import VERSION, Abort, Beat, Bye, Died, Hello, Kill, Message, Peer, Ready
from tests.simulation.callers import Caller
from tests.simulation.engines import Engine, Job
from tests.simulation.graphs import content, pick, random_pipeline
from tests.simulation.links import Links
from tests.simulation.memory import Memory

P = TypeVar("P")


class World:
    """Everything, and the clock."""

    run_nonce = "00000000000000ff"

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pipeline = random_pipeline(self.rng)
        self.order = self.pipeline.order()
        self.core = Core([self.pipeline], run=self.run_nonce, entropy=seed)
        self.now = 0.0
        self.up = Links()  #: to the broker
        self.down = Links()
        self.memory = Memory()
        self.engines: dict[Peer, Engine] = {}
        self.callers: dict[Peer, Caller] = {}
        self.loading: list[Engine] = []  #: not ready yet
        self._names = 0
        self._tags = 0

    def run(self, steps: int) -> None:
        """Random life, then peace in which everything must end."""
        for stage in self.order:
            for _ in range(1 + pick(self.rng, 3)):
                self._start_engine(stage)
        for i in range(2):
            self.callers[b"c%d" % i] = Caller(self, b"c%d" % i)
        for _ in range(steps):
            self._life()
            self._step()
        for stage in self.order:
            if not any(e.stage == stage and not e.leaving for e in self.engines.values()):
                self._start_engine(stage)
        for _ in range(200_000):
            if not self._calm_step():
                break
        self._check_end()

    # --- births and deaths

    def _life(self) -> None:
        chance = self.rng.random()
        if chance < 0.10:
            self._tags += 1
            self._someone(self.callers).submit(self.rng, self._tags)
        elif chance < 0.12:
            caller = self._someone(self.callers)
            if caller.calls:
                caller.send(Abort(self.rng.choice(list(caller.calls))))
        elif chance < 0.135 and self.engines:
            self._kill_engine(self._someone(self.engines))
        elif chance < 0.15:
            self._start_engine(self.rng.choice(self.order))
        elif chance < 0.155 and self.engines:
            engine = self._someone(self.engines)
            engine.leaving = True
            engine.send(Bye())

    def _someone(self, peers: dict[Peer, P]) -> P:
        return self.rng.choice(list(peers.values()))

    def _start_engine(self, stage: str) -> None:
        self._names += 1
        engine = Engine(self, b"w%06d" % self._names, stage)
        self.engines[engine.peer] = engine
        self.up.put(engine.guardian, Hello(VERSION, "", stage, "h", 1))
        self.loading.append(engine)

    def _kill_engine(self, engine: Engine) -> None:
        """SIGKILL: what it had sent may be lost from some point on; its guardian tells."""
        del self.engines[engine.peer]
        engine.views.die()
        self.up.cut(engine.peer, pick(self.rng, len(self.up[engine.peer]) + 1))
        self.down.cut(engine.peer, 0)
        if engine in self.loading:
            self.loading.remove(engine)
        self.up.put(engine.guardian, Died(engine.peer, "signal SIGKILL"))

    # --- one thing happens

    def _step(self) -> None:
        way = pick(self.rng, 14)
        if way < 4:
            self._up()
        elif way < 8:
            self._down()
        elif way < 12:
            self._work()
        elif way == 12:
            self._load()
        else:
            self._pass_time()

    def _calm_step(self) -> bool:
        """Like :meth:`_step`; false when nothing can happen any more."""
        if self.up or self.down or self.loading:
            self._step()
            return True
        return self._work()

    def _up(self) -> None:
        if self.up:
            self._event(Received(self.now, *self.up.take(self.rng)))

    def _down(self) -> None:
        if self.down:
            self._deliver(*self.down.take(self.rng))

    def _work(self) -> bool:
        busy = [engine for engine in self.engines.values() if engine.jobs]
        if busy:
            busy[pick(self.rng, len(busy))].step(self.rng)
        return bool(busy)

    def _load(self) -> None:
        """An engine has loaded its model; it was welcomed before."""
        if self.loading:
            engine = self.loading.pop(0)
            if any(isinstance(m, Hello) for m in self.up[engine.guardian]):
                self.loading.append(engine)
            else:
                capacity = 1 + pick(self.rng, 3)
                engine.send(Ready(VERSION, engine.guardian, capacity, 1, engine.arena))

    def _pass_time(self) -> None:
        self.now += self.rng.random() * 0.1
        for peer in (*self.callers, *(engine.guardian for engine in self.engines.values())):
            if not (queue := self.up[peer]):
                self._event(Received(self.now, peer, Beat()))
            elif not isinstance(queue[-1], Beat):  # it must not overtake what is under way
                self.up.put(peer, Beat())
        self._event(Tick(self.now))

    def _event(self, event: Event) -> None:
        for instruction in self.core.handle(event):
            if type(instruction) is Send:
                if type(instruction.message) is not Beat:
                    self.down.put(instruction.peer, instruction.message)
            elif type(instruction) is Reap:
                self.memory.reap(instruction.arena)

    def _deliver(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Kill):
            if (engine := self.engines.get(message.worker)) is not None:
                self._kill_engine(engine)
        elif (someone := self.engines.get(peer) or self.callers.get(peer)) is not None:
            someone.on(message)

    # --- what must hold

    def check_inputs(self, job: Job) -> None:
        """A task that succeeds has seen everything that its producers gave."""
        for edge, inlet in job.inlets.items():
            producer = self.pipeline.edges[edge].from_
            if producer != "request":
                given = content(job.request, self.order.index(producer))
                assert inlet.values == given, "an input is not whole"

    def _check_end(self) -> None:
        """Every request has ended, and nothing of it is left anywhere."""
        for caller in self.callers.values():
            for tag, call in caller.calls.items():
                assert call.ended, f"request {tag} never ended"
        tasks = self.core.tasks
        assert not tasks.requests
        assert not len(tasks.blocks), "blocks are left"
        assert not tasks.blocks.holds
        assert all(stage.scheduler.length == 0 for stage in tasks.pipelines["p"].stages)
        for peer in (*self.engines.values(), *self.callers.values()):
            assert not self.memory.left(peer.arena), f"never freed: {self.memory.left(peer.arena)}"
