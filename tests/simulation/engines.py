"""An engine process: takes its inputs in, then gives its chunks one by one, each at a random moment."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from adapters.handle import BlockId, Chunk
from broker.protocol import Assign, Cancel, EdgeInput, Emit, Error, Failed, Finish, Free, Input, Message, Peer
from tests.simulation.graphs import content, pick
from tests.simulation.peers import Producer

if TYPE_CHECKING:
    from tests.simulation.world import World


class Inlet:
    """What has come over one edge of a job."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.closed = False


class Job:
    """An attempt that an engine holds a lease on."""

    def __init__(self, m: Assign) -> None:
        self.request, self.stage, self.attempt = m.request, m.stage, m.attempt
        self.next = m.resume.emitted if m.resume else 0
        self.values = content(m.request, m.stage)
        self.inlets: dict[int, Inlet] = {}
        self.blocks: list[BlockId] = []

    @property
    def waits(self) -> bool:
        """Whether more input is due."""
        return not all(inlet.closed for inlet in self.inlets.values())


class Engine(Producer):
    def __init__(self, world: World, peer: Peer, stage: str) -> None:
        super().__init__(world, peer)
        self.stage = stage
        self.guardian = b"g" + peer[1:]
        self.jobs: dict[tuple[int, int], Job] = {}
        self.leaving = False

    def on(self, m: Message) -> None:
        """A message of the broker's has come."""
        if isinstance(m, Assign):
            job = self.jobs[m.request, m.stage] = Job(m)
            for edge in m.inputs:
                self._feed(job, edge)
        elif isinstance(m, Input):
            if (known := self._job(m)) is not None:
                self._feed(known, m.input)
            else:
                for chunk in m.input.chunks:
                    self.see(chunk)
                    self.release([handle.block for handle in chunk.handles])
        elif isinstance(m, Cancel):
            if (known := self._job(m)) is not None:
                self._end(known, Failed(m.request, m.stage, m.attempt, "cancelled"))
        elif isinstance(m, Free):
            self.freed(m)

    def _job(self, m: Input | Cancel) -> Job | None:
        job = self.jobs.get((m.request, m.stage))
        return job if job is not None and job.attempt == m.attempt else None

    def _feed(self, job: Job, edge: EdgeInput) -> None:
        inlet = job.inlets.setdefault(edge.edge, Inlet())
        assert not inlet.closed, "input after its end"
        for chunk in edge.chunks:
            assert chunk.seq == len(inlet.values), "an input chunk is missing or doubled"
            inlet.values.append(self.see(chunk))
            job.blocks += [handle.block for handle in chunk.handles]
        inlet.closed = edge.closed

    def step(self, rng: random.Random) -> None:
        """One job moves on, if it can."""
        jobs = list(self.jobs.values())
        job = jobs[pick(rng, len(jobs))]
        key = (job.request, job.stage, job.attempt)
        waits = job.waits
        if rng.random() < 0.03:
            self._end(job, Failed(*key, "item", Error("stage_failed", "x")))
        elif job.next < len(job.values) - waits:
            last = job.next == len(job.values) - 1 and rng.random() < 0.5
            emit = Emit(*key, self._chunk(job, last=last))
            if last:
                self._end(job, emit)
            else:
                self.send(emit)
        elif not waits:
            self._end(job, Finish(*key))

    def _chunk(self, job: Job, *, last: bool) -> Chunk:
        seq = job.next
        job.next += 1
        return self.chunk(seq, job.values[seq], last=last)

    def _end(self, job: Job, message: Emit | Finish | Failed) -> None:
        if not isinstance(message, Failed):
            self.world.check_inputs(job)
        del self.jobs[job.request, job.stage]
        self.send(message)
        self.release(job.blocks)
