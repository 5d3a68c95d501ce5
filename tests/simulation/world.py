"""A seeded world around the core: random graphs, and every process may die, stop or leave at any moment.

All randomness comes from one seed, so a failing seed replays.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable

from broker.protocol import Assign, Message, Peer
from tests.simulation.calls import Call
from tests.simulation.clients import Client, Stream
from tests.simulation.engines import Engine
from tests.simulation.faults import Faults
from tests.simulation.graphs import content, pick, random_pipeline
from tests.simulation.jobs import Job
from tests.simulation.life import Life
from tests.simulation.links import Links
from tests.simulation.memory import Memory
from tests.simulation.peers import Process
from tests.simulation.shell import Broker
from tests.simulation.trace import describe

LONGEST_FRAME = 4  #: messages that come together, at most
CALM_STEPS = 50_000  #: more than any world needs to come to its end


class World:
    """Everything, and the clock."""

    RUN = "00000000000000ff"
    HOST = "0" * 12
    LIVENESS_S, KEEP_S, DETACHED_S = 6.0, 20.0, 10.0

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.faults = Faults(self.rng)
        #: Where guardians may be; "" is the broker's host. Drawn apart: the other draws stay as they are.
        self.hosts = random.Random(f"{seed} hosts").choice([[""], ["", "a" * 12], ["a" * 12, "b" * 12]])
        self.pipeline = random_pipeline(self.rng, self.faults.checkpoints)
        self.order = self.pipeline.order()
        self._trace = trace
        self.now = 0.0
        self.up = Links()  #: to the broker
        self.down = Links()
        self.memory = Memory(self.RUN, lambda peer: self.broker.knows(peer))  # noqa: PLW0108 - there is no broker yet
        self.processes: dict[Peer, Process] = {}
        self.calls: dict[str, Call] = {}
        self.seeds: dict[int, int] = {}  #: request -> its seed
        self.given: dict[str, int] = {}  #: name -> what the caller gave
        self.blamed: Counter[tuple[int, int]] = Counter()  #: task -> mishaps that count against it
        self._names = 0
        self.broker = Broker(self)
        self.life = Life(self)

    def trace(self, way: str, peer: Peer, what: object) -> None:
        """For a person who replays a seed."""
        if self._trace is not None:
            self._trace(f"{self.now:8.3f} {way} {peer.decode():8s} {describe(what)}")

    # --- its course

    def run(self, steps: int) -> None:
        """Random life, then peace in which everything must end."""
        self.life.begin()
        for _ in range(steps):
            self.life.mishap()
            self._step()
        self.faults.stop()
        self.life.make_peace()
        for _ in range(CALM_STEPS):
            if self.moves():
                self._step()
            elif not self.life.let_time_pass():
                break
        self._check_end()

    def moves(self) -> bool:
        """Whether anything can happen without time passing."""
        life = self.life
        return bool(self.up or self.down or life.vacancies or life.can_work() or life.waiting())

    def _step(self) -> None:
        """A few things happen, in some order."""
        ways = [self._up, self._down, self.life.work]
        self.rng.shuffle(ways)
        for way in ways:
            way()
        chance = self.rng.random()
        if chance < 0.1:
            self.life.recover()
        elif chance < 0.2:
            self.life.pass_time()

    def _up(self) -> None:
        """Some of a peer's messages reach the broker together, as in one frame."""
        if not self.up or not self.broker.up:
            return
        peer = self.up.pick(self.rng)
        for _ in range(1 + pick(self.rng, LONGEST_FRAME)):
            if peer is not None and self.up[peer]:
                self.broker.receive(peer, self.up.take_from(peer))

    def _down(self) -> None:
        if not self.down or (peer := self.down.pick(self.rng, self.life.stopped)) is None:
            return
        for _ in range(1 + pick(self.rng, LONGEST_FRAME)):
            if self.down[peer]:
                message = self.down.take_from(peer)
                if (process := self.processes.get(peer)) is not None:
                    process.on(message)

    # --- births and deaths

    def new_peer(self, kind: bytes) -> Peer:
        """A fresh identity."""
        self._names += 1
        return b"%s%06d" % (kind, self._names)

    def kept(self, queue: deque[Message]) -> int:
        """How many of a link's messages survive the death of one of its ends."""
        return pick(self.rng, len(queue) + 1)

    def kill(self, process: Process) -> None:
        """SIGKILL: what it had sent may be lost from some point on."""
        self.trace("xx", process.peer, "dies")
        peer = process.peer
        del self.processes[peer]
        self.life.stopped.pop(peer, None)
        if isinstance(process, Engine):
            self.blame_engine(peer)
        process.die()
        self.up.lose_newest(peer, self.kept(self.up[peer]) if self.broker.up else 0)
        self.down.lose_newest(peer, 0)
        if self.rng.random() < 0.5:
            self.broker.disconnect(peer)
        else:
            self.life.unnoticed.append(peer)

    def leave(self, client: Client) -> None:
        """A client process ends by itself: what it has sent arrives."""
        del self.processes[client.peer]
        client.die()
        self.down.lose_newest(client.peer, 0)
        self.life.unnoticed.append(client.peer)

    def living_arenas(self) -> set[str]:
        """Arenas whose owner holds their lock."""
        return {a for p in self.processes.values() if isinstance(p, Engine | Client) for a in p.arenas}

    def leftovers(self) -> bool:
        """Whether there is anything of the dead."""
        return bool(self.memory.files or self.memory.arenas.keys() - self.living_arenas())

    # --- what must hold

    def assigned(self, m: Assign) -> None:
        """An engine has got a task."""
        assert self.seeds.setdefault(m.request, m.seed) == m.seed, "a request has changed its seed"

    def blame(self, attempt: tuple[int, int, int]) -> None:
        """This attempt ends by a mishap."""
        self.blamed[attempt[:2]] += 1

    def blame_engine(self, peer: Peer) -> None:
        """All that an engine may have been given ends by its death."""
        for task, holder in self.broker.holders.items():
            if holder == peer:
                self.blamed[task] += 1

    def check_inputs(self, job: Job) -> None:
        """A task that succeeds has seen everything that its producers gave."""
        for inlet in job.inlets:
            producer = self.pipeline.edges[inlet.edge].from_
            given = (
                [self.given[job.folder]]
                if producer == "request"
                else content(job.seed, self.order.index(producer))
            )
            assert inlet.taken == given, "an input is not whole"

    def dropped(self, stream: Stream) -> None:
        """A client process has to give a call up."""
        if stream.call.stream is stream:
            stream.call.stream = None
            stream.call.status = "refused"

    def _check_end(self) -> None:
        """Every request has ended, and nothing of it is left anywhere."""
        for call in self.calls.values():
            assert not call.open, f"{call.name} (request {call.number}) never ended"
        self.broker.check_trust()
        core = self.broker.core
        board = core.board
        assert not board.requests, f"requests are left: {list(board.requests)}"
        assert not board.names
        assert not board.blocks.in_limbo, f"never introduced: {list(core.awaited)}"
        left = {
            describe(key): (
                block.count,
                block.owner,
                [p for p, held in board.blocks._holds.items() if key in held],
            )
            for key, block in board.blocks._blocks.items()
        }
        assert not left, f"blocks are left, with (count, owner, holders): {left}"
        assert not board.blocks.holds
        assert not board.blocks.orphaned
        assert all(stage.scheduler.length == 0 for stage in board.pipelines["p"].stages)
        assert not any(worker.tasks for worker in core.workers.values())
        assert not any(client.requests for client in core.clients.values())
        assert not self.broker.journal.requests, "records are left"
        strangers = set(self.broker.journal.peers) - set(self.processes)
        assert not strangers, f"dead peers are remembered: {strangers}"
        living = self.living_arenas()
        current = {p.arena for p in self.processes.values() if isinstance(p, Engine | Client)}
        for arena, blocks in self.memory.arenas.items():
            if arena in living and arena not in current:
                continue  # it goes with its owner, which was given up and has another now
            assert arena in living, f"the dead's {arena} is left"
            assert not blocks, f"never freed: {blocks}"
        assert not self.memory.files, f"files are left: {self.memory.files}"
        for process in self.processes.values():
            if isinstance(process, Engine):
                assert not process.session.unseen(), f"{process.peer!r} was never told what was read"
                assert not process.session.leases(), f"{process.peer!r} remembers tasks that are over"
        for process in self.processes.values():
            if isinstance(process, Engine | Client):
                resync = process.session.resync()
                assert not resync.holds, (
                    f"{process.peer!r} remembers views that are gone: {describe(resync.holds)}"
                )
                assert not resync.lent, (
                    f"{process.peer!r} remembers blocks that are freed: {describe(resync.lent)}"
                )
