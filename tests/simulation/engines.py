"""An engine process: runs jobs, remembers what the broker may not have read."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from adapters.handle import Handle
from broker.protocol import (
    VERSION,
    Assign,
    Bye,
    Cancel,
    Checkpoint,
    Drain,
    Emit,
    Failed,
    Finish,
    Free,
    Grant,
    Input,
    Message,
    Peer,
    Ready,
    Seen,
    Who,
)
from broker.session import EngineSession
from tests.simulation.graphs import pick
from tests.simulation.jobs import Job
from tests.simulation.memory import Gone
from tests.simulation.peers import Producer

if TYPE_CHECKING:
    from tests.simulation.guardians import Guardian
    from tests.simulation.world import World


class Engine(Producer):
    """An engine of a stage."""

    session: EngineSession

    def __init__(self, world: World, peer: Peer, guardian: Guardian) -> None:
        super().__init__(world, peer)
        self.guardian = guardian
        self.host = guardian.host
        self.stage = guardian.stage
        self.options = world.pipeline.stages[self.stage].options
        self.durable = world.pipeline.durable(self.stage)
        self.session = EngineSession(guardian.session.boot)
        self.jobs: dict[tuple[int, int, int], Job] = {}
        self.draining = False  #: it has said Bye
        self.drained = False  #: and was answered: nothing new comes
        self.farewell = False  #: it has said Bye again, for the broker to have read everything
        self.done = False  #: it exits
        self.open_arena()
        self._ready()

    def _ready(self) -> None:
        capacity, resumes = self.options["capacity"], self.options["resumes"]
        leases, sent = self.session.leases(), self.session.results_seen
        self.send(Ready(VERSION, self.guardian.peer, capacity, 1, self.arena, resumes, leases, sent))

    def on(self, m: Message) -> None:
        if isinstance(m, Input):
            self._on_input(m)
        elif isinstance(m, Free):
            self.freed(m)
        elif isinstance(m, Grant):
            if (job := self._job(m)) is not None:
                job.granted = (m.chunks, m.nbytes)
        elif isinstance(m, Assign):
            self._on_assign(m)
        elif isinstance(m, Cancel):
            if (job := self._job(m)) is not None:
                job.cancel()
        elif isinstance(m, Seen):
            self.session.seen(m.results)
        elif isinstance(m, Who):
            self._on_who(m)
        elif isinstance(m, Drain):
            self.done = self.done or self.farewell
            self.drained = True
            self.leave_if_empty()

    def _job(self, m: Input | Grant | Cancel) -> Job | None:
        return self.jobs.get((m.request, m.stage, m.attempt))

    def _on_assign(self, m: Assign) -> None:
        self.session.assigned(m)
        self.world.assigned(m)
        name = (m.request, m.stage, m.attempt)
        assert name not in self.jobs, "an attempt was assigned twice"
        try:
            self.jobs[name] = Job(self, m)
        except Gone:  # its checkpoint; there is no job yet that would let go of its inputs
            chunks = [chunk for item in m.inputs for chunk in item.chunks]
            if m.resume is not None and m.resume.checkpoint is not None:
                chunks.append(m.resume.checkpoint)
            self.release([handle.block for chunk in chunks for handle in chunk.handles])
            self.result(Failed(*name, "item"))

    def _on_input(self, m: Input) -> None:
        if not self.session.fed(m):
            self.done = True  # our connection broke
            return
        job = self._job(m)
        if job is not None:
            job.feed(m.input)
        else:  # it ended before this came
            self.release([handle.block for chunk in m.input.chunks for handle in chunk.handles])

    def _on_who(self, m: Who) -> None:
        act = self.session.introduce(m)
        if act == "gone":
            self.done = True
        elif act == "introduce":
            self.restart_connection()
            for lease in self.session.leases():  # the broker takes all that has come for taken
                for edge, chunks, _ in lease.inputs:
                    self.world.broker.flow.edge(lease.request, edge, chunks)
            for job in self.jobs.values():
                for inlet in job.inlets:
                    inlet.unmeasured, inlet.untold = len(inlet.waiting), (0, 0)
            self._ready()
            for message in self.session.unseen():
                self.send(message)
            if self.draining:
                self.send(Bye())
            self.send(self.session.resync())

    def drain(self) -> None:
        """SIGTERM."""
        self.draining = True
        self.send(Bye())

    def leave_if_empty(self) -> None:
        """The last Bye, when nothing is in hand."""
        if self.drained and not self.jobs and not self.farewell:
            self.farewell = True
            self.send(Bye())

    # --- jobs

    def step(self, rng: random.Random) -> None:
        """One job moves on, if it can."""
        jobs = list(self.jobs.values())
        jobs[pick(rng, len(jobs))].step(rng)

    @property
    def doubtful(self) -> bool:
        return self.suspected is not None or self.guardian.suspected is not None

    @property
    def has_work(self) -> bool:
        return bool(self.jobs)

    def can_step(self) -> bool:
        return any(job.can_step() for job in self.jobs.values())

    def put(self, folder: str) -> Handle:
        """A new block, or a file where there is no room for one."""
        spilled = self.world.rng.random() < self.world.faults.jobs["spill"]
        return self.world.memory.put(self.arena, folder, durable=self.durable, spilled=spilled)

    def result(self, message: Emit | Finish | Failed | Checkpoint) -> None:
        """Something that the broker must read once, whatever happens to it."""
        self.session.sent(message)
        self.send(message)

    def end(self, job: Job, message: Emit | Finish | Failed) -> None:
        """A job is over."""
        del self.jobs[job.name]
        self.result(message)
        self.leave_if_empty()
