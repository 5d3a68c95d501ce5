"""A seeded world around the core: random graphs, workers that die, callers that leave, links with delay.

Every link keeps its order (ZeroMQ's promise), but links run at random speeds against each other, and what a
process had sent may be lost with it. All randomness comes from one seed, so a failing seed replays.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import msgspec

from adapters.chunk import Chunk
from adapters.handle import BlockId, Handle
from broker.core.events import Reap, Received, Send, Tick
from broker.core.machine import Core
from broker.protocol import (
    VERSION,
    Abort,
    Accepted,
    Assign,
    Beat,
    Bye,
    Cancel,
    Connect,
    Died,
    Emit,
    Ended,
    Error,
    Failed,
    Finish,
    Free,
    Hello,
    Input,
    Kill,
    Message,
    Output,
    Ready,
    Release,
    Submit,
)
from pipelines.graph import Pipeline

RUN = "00000000000000ff"


def random_pipeline(rng: random.Random) -> Pipeline:
    """A graph of 1 to 5 stages, each fed by the caller or by earlier ones, all of them of some use."""
    names = [f"s{i}" for i in range(rng.randint(1, 5))]
    edges = []
    for i, name in enumerate(names):
        producers = rng.sample(["request", *names[:i]], rng.randint(1, min(2, i + 1)))
        edges += [{"from": p, "to": name, "stream": rng.random() < 0.7} for p in producers]
    used = {edge["from"] for edge in edges}
    outputs = {f"o{name}": name for name in names if name not in used or rng.random() < 0.3}
    stages = {n: {"engine": "f", "retry": {"attempts": 5, "timeout_s": 500}} for n in names}
    return msgspec.convert({"name": "p", "outputs": outputs, "stages": stages, "edges": edges}, Pipeline)


def content(request: int, stage: int) -> list[int]:
    """What a stage gives for a request: the same in each attempt."""
    rng = random.Random(request * 1000 + stage)
    return [rng.randrange(1 << 30) for _ in range(rng.randint(0, 4))]


class Producer:
    """Somebody with an arena; knows which blocks are out, and fails on a free too many."""

    def __init__(self, world: World, peer: bytes) -> None:
        self.world = world
        self.peer = peer
        self.arena = f"omni-{RUN}-{peer.hex():0<8}-"
        self.offset = 0
        self.held: Counter[BlockId] = Counter()

    def chunk(self, seq: int, value: int, *, last: bool) -> Chunk:
        handles = []
        if value % 2:
            self.offset += 1
            handles = [Handle("shm", BlockId(f"{self.arena}0", self.offset, 1), 4, "float32", (1,))]
            self.world.blocks[handles[0].block] = self
        return Chunk(seq, last, msgspec.Raw(msgspec.msgpack.encode(value)), handles)

    def see(self, chunk: Chunk) -> int:
        """Looks at a chunk's blocks: they must be there."""
        for handle in chunk.handles:
            assert handle.block in self.world.blocks, f"{handle.block} was freed, but is still sent"
            self.held[handle.block] += 1
        value: int = msgspec.msgpack.decode(chunk.body)
        return value

    def release(self, block: BlockId) -> None:
        self.held[block] -= 1
        if not self.held[block]:
            del self.held[block]
        self.world.send(self.peer, Release([block]))


class SimWorker(Producer):
    """An engine: takes its inputs in, then gives its chunks one by one, each at a random moment."""

    def __init__(self, world: World, peer: bytes, stage: str) -> None:
        super().__init__(world, peer)
        self.stage = stage
        self.guardian = b"g" + peer[1:]
        self.jobs: dict[tuple[int, int], dict[str, Any]] = {}
        self.leaving = False
        world.send(self.guardian, Hello(VERSION, "", stage, "h", 1))
        world.send(self.guardian, Beat())
        world.ready_due.append(self)

    def on(self, m: Message) -> None:
        if isinstance(m, Assign):
            job = {"m": m, "inputs": {}, "next": m.resume.emitted if m.resume else 0}
            self.jobs[m.request, m.stage] = job
            for edge in m.inputs:
                self._feed(job, edge)
        elif isinstance(m, Input):
            job = self.jobs.get((m.request, m.stage))
            if job is not None and job["m"].attempt == m.attempt:
                self._feed(job, m.input)
            else:
                for chunk in m.input.chunks:
                    self.see(chunk)
                    self._release_all(chunk)
        elif isinstance(m, Cancel):
            job = self.jobs.get((m.request, m.stage))
            if job is not None and job["m"].attempt == m.attempt:
                self._end(job, Failed(m.request, m.stage, m.attempt, "cancelled"))
        elif isinstance(m, Free):
            self.world.freed(self, m)

    def _feed(self, job: dict[str, Any], edge: Any) -> None:
        values, chunks, closed = job["inputs"].setdefault(edge.edge, ([], [], []))
        assert not closed, "input after its end"
        for chunk in edge.chunks:
            assert chunk.seq == len(values), "an input chunk is missing or doubled"
            values.append(self.see(chunk))
            chunks.append(chunk)
        if edge.closed:
            closed.append(True)

    def step(self, rng: random.Random) -> None:
        """One job moves on, if it can."""
        if not self.jobs:
            return
        job = rng.choice(list(self.jobs.values()))
        m: Assign = job["m"]
        values = content(m.request, m.stage)
        waits = not all(closed for _, _, closed in job["inputs"].values())
        if rng.random() < 0.03:
            self._end(job, Failed(m.request, m.stage, m.attempt, "item", Error("stage_failed", "x")))
        elif job["next"] < len(values) - waits:
            seq = job["next"]
            job["next"] += 1
            last = job["next"] == len(values) and not waits and rng.random() < 0.5
            emit = Emit(m.request, m.stage, m.attempt, self.chunk(seq, values[seq], last=last))
            if last:
                self._end(job, emit)
            else:
                self.world.send(self.peer, emit)
        elif not waits:
            self._end(job, Finish(m.request, m.stage, m.attempt))

    def _end(self, job: dict[str, Any], message: Message) -> None:
        m: Assign = job["m"]
        if isinstance(message, Finish) or (isinstance(message, Emit) and message.chunk.last):
            self.world.check_inputs(m, job["inputs"])
        del self.jobs[m.request, m.stage]
        self.world.send(self.peer, message)
        for _, chunks, _ in job["inputs"].values():
            for chunk in chunks:
                self._release_all(chunk)

    def _release_all(self, chunk: Chunk) -> None:
        for handle in chunk.handles:
            self.release(handle.block)


class SimClient(Producer):
    """A caller with several requests; checks that each output comes whole and in order."""

    def __init__(self, world: World, peer: bytes) -> None:
        super().__init__(world, peer)
        self.tags: dict[int, dict[str, Any]] = {}
        world.send(peer, Connect(VERSION, "api", self.arena))

    def submit(self, rng: random.Random, tag: int) -> None:
        pipeline = self.world.pipeline
        outputs = rng.sample(sorted(pipeline.outputs), rng.randint(1, len(pipeline.outputs)))
        given = {"request": [self.chunk(0, rng.randrange(1 << 30), last=True)]}
        self.tags[tag] = {"outputs": {name: [] for name in outputs}, "number": 0, "ended": None}
        self.world.send(
            self.peer, Submit(tag, "p", outputs, given, priority=rng.randint(0, 2), tenant=str(tag % 3))
        )

    def on(self, m: Message) -> None:
        if isinstance(m, Accepted):
            self.tags[m.tag]["number"] = m.request
        elif isinstance(m, Output):
            record = self.tags[m.tag]
            assert record["ended"] is None, "an output after the end"
            got = record["outputs"][m.output]
            assert m.chunk.seq == len(got), "an output chunk is missing or doubled"
            got.append(self.see(m.chunk))
            for handle in m.chunk.handles:
                self.release(handle.block)
        elif isinstance(m, Ended):
            record = self.tags[m.tag]
            assert record["ended"] is None, "two ends"
            record["ended"] = m.status
            if m.status == "done":
                order = self.world.pipeline.order()
                for output, got in record["outputs"].items():
                    stage = order.index(self.world.pipeline.outputs[output])
                    assert got == content(record["number"], stage), "an output is not whole"
        elif isinstance(m, Free):
            self.world.freed(self, m)


class World:
    """Everything, and the clock."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pipeline = random_pipeline(self.rng)
        self.core = Core([self.pipeline], run=RUN, entropy=seed)
        self.now = 0.0
        self.up: dict[bytes, deque[Message]] = {}
        self.down: dict[bytes, deque[Message]] = {}
        self.blocks: dict[BlockId, Producer] = {}
        self.workers: dict[bytes, SimWorker] = {}
        self.clients: dict[bytes, SimClient] = {}
        self.ready_due: list[SimWorker] = []
        self._names = 0
        self._tags = 0

    def send(self, peer: bytes, message: Message) -> None:
        """A process puts a message on its link to the broker."""
        self.up.setdefault(peer, deque()).append(message)

    def freed(self, owner: Producer, m: Free) -> None:
        """The broker says that nobody needs these: it must be true, and be said once."""
        for block in m.blocks:
            assert self.blocks.pop(block, None) is owner, f"{block} freed twice, or by the wrong owner"
            self._nobody_holds(block)

    def _nobody_holds(self, block: BlockId) -> None:
        for holder in (*self.workers.values(), *self.clients.values()):
            assert block not in holder.held, f"{block} freed while {holder.peer!r} looks at it"

    def check_inputs(self, m: Assign, inputs: dict[int, Any]) -> None:
        """A task that succeeds has seen everything that its producers gave."""
        order = self.pipeline.order()
        for edge, (values, _, _) in inputs.items():
            producer = self.pipeline.edges[edge].from_
            if producer != "request":
                assert values == content(m.request, order.index(producer)), "an input is not whole"

    def start_worker(self, stage: str) -> None:
        self._names += 1
        peer = b"w%06d" % self._names
        self.workers[peer] = SimWorker(self, peer, stage)

    def kill_worker(self, worker: SimWorker) -> None:
        """SIGKILL: what it had sent may be lost from some point on; its guardian tells."""
        del self.workers[worker.peer]
        link = self.up.get(worker.peer, deque())
        for _ in range(self.rng.randint(0, len(link))):
            link.pop()
        self.down.pop(worker.peer, None)
        if worker in self.ready_due:
            self.ready_due.remove(worker)
        self.send(worker.guardian, Died(worker.peer, "signal SIGKILL"))

    def run(self, steps: int) -> None:
        """Random life, then peace in which everything must end."""
        for stage in self.pipeline.stages:
            for _ in range(self.rng.randint(1, 3)):
                self.start_worker(stage)
        for i in range(2):
            self.clients[b"c%d" % i] = SimClient(self, b"c%d" % i)
        for _ in range(steps):
            self._life()
            self._step()
        for stage in self.pipeline.stages:
            if not any(w.stage == stage and not w.leaving for w in self.workers.values()):
                self.start_worker(stage)
        for _ in range(200_000):
            if not self._step(calm=True):
                break
        self.check_end()

    def check_end(self) -> None:
        """Every request has ended, and nothing of it is left anywhere."""
        for client in self.clients.values():
            for tag, record in client.tags.items():
                assert record["ended"], f"request {tag} never ended"
        tasks = self.core.tasks
        assert not tasks.requests
        assert not len(tasks.blocks), "blocks are left"
        assert not tasks.blocks.holds
        assert all(stage.scheduler.length == 0 for stage in tasks.pipelines["p"].stages)
        living = {p.arena for p in (*self.workers.values(), *self.clients.values())}
        left = [b for b, owner in self.blocks.items() if owner.arena in living]
        assert not left, f"never freed: {left}"

    def _life(self) -> None:
        rng = self.rng
        chance = rng.random()
        if chance < 0.10:
            self._tags += 1
            rng.choice(list(self.clients.values())).submit(rng, self._tags)
        elif chance < 0.12:
            client = rng.choice(list(self.clients.values()))
            if client.tags:
                self.send(client.peer, Abort(rng.choice(list(client.tags))))
        elif chance < 0.135 and self.workers:
            self.kill_worker(rng.choice(list(self.workers.values())))
        elif chance < 0.15:
            self.start_worker(rng.choice(list(self.pipeline.stages)))
        elif chance < 0.155 and self.workers:
            worker = rng.choice(list(self.workers.values()))
            worker.leaving = True
            self.send(worker.peer, Bye())

    def _step(self, *, calm: bool = False) -> bool:
        """One thing happens; false when nothing can any more."""
        rng = self.rng
        ways = ["up"] * 4 + ["down"] * 4 + ["work"] * 4 + ["ready", "time"]
        if calm and not (any(self.up.values()) or any(self.down.values()) or self.ready_due):
            if not any(w.jobs for w in self.workers.values()):
                return False
            ways = ["work"]
        way = rng.choice(ways)
        if way == "up" and (links := [p for p, q in self.up.items() if q]):
            peer = rng.choice(links)
            self._event(Received(self.now, peer, self.up[peer].popleft()))
        elif way == "down" and (links := [p for p, q in self.down.items() if q]):
            self._deliver(rng.choice(links))
        elif way == "work" and (busy := [w for w in self.workers.values() if w.jobs]):
            rng.choice(busy).step(rng)
        elif way == "ready" and self.ready_due:
            worker = self.ready_due.pop(0)
            self.send(worker.guardian, Beat())
            if not any(isinstance(m, Hello) for m in self.up[worker.guardian]):
                self.send(worker.peer, Ready(VERSION, worker.guardian, rng.randint(1, 3), 1, worker.arena))
            else:
                self.ready_due.append(worker)
        elif way == "time":
            self.now += rng.random() * 0.1
            for peer in (*self.clients, *(w.guardian for w in self.workers.values())):
                self._event(Received(self.now, peer, Beat()))
            self._event(Tick(self.now))
        return True

    def _deliver(self, peer: bytes) -> None:
        message = self.down[peer].popleft()
        if isinstance(message, Kill):
            worker = self.workers.get(message.worker)
            if worker is not None:
                self.kill_worker(worker)
        elif (someone := self.workers.get(peer) or self.clients.get(peer)) is not None:
            someone.on(message)

    def _event(self, event: Any) -> None:
        for instruction in self.core.handle(event):
            if isinstance(instruction, Send):
                if not isinstance(instruction.message, Beat):
                    self.down.setdefault(instruction.peer, deque()).append(instruction.message)
            elif isinstance(instruction, Reap):
                for block in [b for b, owner in self.blocks.items() if owner.arena == instruction.arena]:
                    self._nobody_holds(block)
                    del self.blocks[block]
