"""An attempt in an engine's hands: what it takes, gives and notes, one step at a time."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

from adapters.handle import BlockId, Chunk, size_of
from broker.protocol import Assign, Checkpoint, EdgeInput, Emit, Error, Failed, Finish, Took
from tests.simulation.graphs import content, pick, state
from tests.simulation.memory import Gone
from tests.simulation.peers import value_of

if TYPE_CHECKING:
    from tests.simulation.engines import Engine


class Inlet:
    """What has come over one edge of a job."""

    def __init__(self, edge: int) -> None:
        self.edge = edge
        self.received = 0
        self.closed = False
        self.waiting: deque[Chunk] = deque()  #: not taken yet
        self.taken: list[int] = []
        self.unmeasured = 0  #: of those that wait, how many the broker takes for taken
        self.untold = (0, 0)  #: (chunks, bytes) taken that the broker has not heard of

    @property
    def done(self) -> bool:
        """Whether the job has taken everything there will ever be."""
        return self.closed and not self.waiting


class Job:
    """An attempt that an engine holds a lease on."""

    def __init__(self, engine: Engine, m: Assign) -> None:
        self.engine = engine
        self.name = (m.request, m.stage, m.attempt)
        self.folder = m.name
        self.seed = m.seed
        self.values = content(m.seed, m.stage)
        self.granted = m.granted
        self.next = m.resume.emitted if m.resume else 0
        self.nbytes = 0  #: sent by this attempt
        self.hangs = False
        self.inlets: list[Inlet] = []
        self.blocks: list[BlockId] = []  #: looked at until the job ends
        for item in m.inputs:
            self.inlets.append(Inlet(item.edge))
            self.feed(item)
        if m.resume is not None:
            self._resume(m)

    def _resume(self, m: Assign) -> None:
        assert m.resume is not None
        mark, options = m.resume.checkpoint, self.engine.options
        bodies = [value_of(Chunk(0, False, body)) for body in m.resume.bodies]
        if options["resumes"]:
            assert bodies == self.values[: self.next], "what earlier attempts gave is not all there"
        if mark is not None:
            assert options["resumes"]
            assert mark.seq <= self.next, "a checkpoint of chunks that are not out"
            assert value_of(mark) == state(self.seed, m.stage, mark.seq), "a checkpoint of something else"
            self._see(mark)

    def _see(self, chunk: Chunk) -> None:
        """Looks at a chunk's blocks, until the job ends."""
        self.engine.views.open(chunk)
        self.blocks += [handle.block for handle in chunk.handles]

    def feed(self, item: EdgeInput) -> None:
        """More of an edge has come."""
        inlet = next(inlet for inlet in self.inlets if inlet.edge == item.edge)
        assert not inlet.closed, "input after its end"
        for chunk in item.chunks:
            assert chunk.seq == inlet.received, "an input chunk is missing or doubled"
            inlet.received += 1
            inlet.waiting.append(chunk)
        inlet.closed = item.closed

    # --- one step

    def step(self, rng: random.Random) -> None:
        """One thing happens in this job, if anything can."""
        faults = self.engine.world.faults.jobs
        if self.hangs:
            return
        chance = rng.random()
        if chance < faults["item"]:
            self.engine.world.blame(self.name)
            self._end(Failed(*self.name, "item", Error("stage_failed", "x")))
        elif chance < faults["item"] + faults["hang"]:
            self.hangs = True
        else:
            choices = self._takeable() + ["give"] * self._may_give()
            if choices:
                chosen = choices[pick(rng, len(choices))]
                self._give(rng) if isinstance(chosen, str) else self._take(chosen, rng)
            elif all(inlet.done for inlet in self.inlets) and self.next == len(self.values):
                self._end(Finish(*self.name, self.next))

    def can_step(self) -> bool:
        """Whether a step would do something."""
        if self.hangs:
            return False
        return bool(self._takeable()) or self._may_give() or self._may_finish()

    def _may_finish(self) -> bool:
        return self.next >= len(self.values) and all(inlet.done for inlet in self.inlets)

    def _takeable(self) -> list[Inlet | str]:
        open_ = [inlet for inlet in self.inlets if not inlet.done]
        if self.engine.options["in_turn"]:
            open_ = open_[:1]
        return [inlet for inlet in open_ if inlet.waiting]

    def _may_give(self) -> bool:
        if self.next >= self.granted[0] or self.nbytes >= self.granted[1]:
            return False
        if all(inlet.done for inlet in self.inlets):
            return self.next < len(self.values)
        if self.next >= len(self.values) - 1:
            return False
        taken = sum([len(inlet.taken) for inlet in self.inlets])
        return bool(self.engine.options["eager"]) or self.next < taken

    def _take(self, inlet: Inlet, rng: random.Random) -> None:
        chunk = inlet.waiting.popleft()
        try:
            self._see(chunk)
        except Gone:
            self.engine.release([handle.block for handle in chunk.handles])
            self._end(Failed(*self.name, "item", Error("stage_failed", "BadHandle")))
            return
        inlet.taken.append(value_of(chunk))
        if chunk.handles and rng.random() < 0.5:  # its views die early
            self._let_go([handle.block for handle in chunk.handles])
        self.engine.world.broker.flow.edge(self.name[0], inlet.edge, len(inlet.taken))
        self._measure(inlet, chunk)

    def _measure(self, inlet: Inlet, chunk: Chunk) -> None:
        """Tells the broker each time a quarter of what may wait has been taken."""
        if inlet.unmeasured:
            inlet.unmeasured -= 1
            return
        chunks, nbytes = inlet.untold[0] + 1, inlet.untold[1] + size_of(chunk)
        limits = self.engine.world.pipeline.limits
        if chunks * 4 >= limits.ahead_chunks or nbytes * 4 >= limits.ahead_mb * 2**20:
            self.engine.send(Took(*self.name, inlet.edge, chunks, nbytes))
            chunks = nbytes = 0
        inlet.untold = (chunks, nbytes)

    def _let_go(self, blocks: list[BlockId]) -> None:
        for block in blocks:
            self.blocks.remove(block)
            self.engine.views.close(block)
        self.engine.release(blocks)

    def _give(self, rng: random.Random) -> None:
        value = self.values[self.next]
        last = self.next == len(self.values) - 1
        last = last and all(inlet.done for inlet in self.inlets) and rng.random() < 0.5
        handles = [self.engine.put(self.folder)] if value % 2 else []
        chunk = self.engine.chunk(self.next, value, handles, last=last)
        self.next += 1
        self.nbytes += size_of(chunk)
        emit = Emit(*self.name, chunk)
        if last:
            self._end(emit)
            return
        self.engine.result(emit)
        if self.engine.options["resumes"] and rng.random() < 0.3:
            mark = state(self.seed, self.name[1], self.next)
            handles = [self.engine.put(self.folder)] if mark % 2 else []
            self.engine.result(
                Checkpoint(*self.name, self.engine.chunk(self.next, mark, handles, last=False))
            )

    def cancel(self) -> None:
        """The broker wants no more of it; one that hangs does not listen."""
        if not self.hangs:
            self._end(Failed(*self.name, "cancelled"))

    def _end(self, message: Emit | Finish | Failed) -> None:
        if not isinstance(message, Failed) and self.engine.suspected is None:
            self.engine.world.check_inputs(self)
        self.engine.end(self, message)
        self._let_go(self.blocks[:])
        unseen = [handle.block for inlet in self.inlets for c in inlet.waiting for handle in c.handles]
        self.engine.release(unseen)
