"""Drives the core by hand: peers are names, what the core sends to each is collected, time is a number."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from adapters.chunk import Chunk
from adapters.handle import BlockId, Handle
from broker.core.events import Discard, Event, Lost, Reap, Received, Send, SweepRun, Tick
from broker.core.machine import Core
from broker.protocol import (
    VERSION,
    Assign,
    Connect,
    Died,
    Emit,
    Failed,
    Finish,
    Hello,
    Inspect,
    Message,
    Ready,
    Report,
    Submit,
)
from pipelines.graph import Pipeline

RUN = "0123456789abcdef"
M = TypeVar("M", bound=Message)


def arena(peer: bytes) -> str:
    """The arena prefix of a peer in these tests."""
    return f"omni-{RUN}-{peer.hex():0<8}-"


def chunk(seq: int, *, last: bool = False, handles: list[Handle] | None = None, body: Any = None) -> Chunk:
    """A chunk whose body is ``{"seq": seq}`` unless given."""
    raw = msgspec.Raw(msgspec.msgpack.encode({"seq": seq} if body is None else body))
    return Chunk(seq, last, raw, handles or [])


def handle(peer: bytes, offset: int, generation: int = 1) -> Handle:
    """A handle into a peer's own arena."""
    return Handle("shm", BlockId(f"{arena(peer)}0", offset, generation), 4, "float32", (1,))


class Driver:
    """A core and its imaginary peers."""

    def __init__(self, *pipelines: Pipeline, **core: Any) -> None:
        self.core = Core(list(pipelines), run=RUN, **core)
        self.now = 100.0
        self.inbox: dict[bytes, list[Message]] = {}
        self.reaped: list[str] = []
        self.discarded: list[str] = []
        self.sweeps = 0
        self.log: list[Event] = []

    def event(self, event: Event) -> None:
        """Feeds one event in and files what comes out."""
        self.log.append(event)
        for instruction in self.core.handle(event):
            if isinstance(instruction, Send):
                self.inbox.setdefault(instruction.peer, []).append(instruction.message)
            elif isinstance(instruction, Reap):
                self.reaped.append(instruction.arena)
            elif isinstance(instruction, Discard):
                self.discarded.append(instruction.name)
            elif isinstance(instruction, SweepRun):
                self.sweeps += 1

    def say(self, peer: bytes, message: Message) -> None:
        """A peer speaks."""
        self.event(Received(self.now, peer, message))

    def tick(self, seconds: float = 1.0) -> None:
        """Time passes."""
        self.now += seconds
        self.event(Tick(self.now))

    def lose(self, peer: bytes) -> None:
        """A send found the peer gone."""
        self.event(Lost(self.now, peer))

    def take(self, peer: bytes, kind: type[M]) -> list[M]:
        """Takes the messages of one kind out of a peer's inbox."""
        box = self.inbox.get(peer, [])
        found = [m for m in box if type(m) is kind]
        self.inbox[peer] = [m for m in box if type(m) is not kind]
        return found  # type: ignore[return-value]

    def worker(
        self, name: str, stage: str, *, capacity: int = 1, pipeline: str = "", resumes: bool = False
    ) -> bytes:
        """A guardian and its engine join; returns the engine's identity (the guardian's is :func:`guard`)."""
        peer = b"w" + name.encode()
        self.say(guard(peer), Hello(VERSION, pipeline, stage, "host", 1))
        self.say(peer, Ready(VERSION, guard(peer), capacity, 2, arena(peer), resumes))
        return peer

    def client(self, name: str = "1") -> bytes:
        """A client joins."""
        peer = b"c" + name.encode()
        self.say(peer, Connect(VERSION, "api", arena(peer)))
        return peer

    def submit(self, client: bytes, tag: int = 1, outputs: tuple[str, ...] = ("out",), **more: Any) -> None:
        """A request for the core's first pipeline, with one empty chunk of input."""
        pipeline = more.pop("pipeline", next(iter(self.core.board.pipelines)))
        given = more.pop("given", {"request": [chunk(0, last=True)]})
        self.say(client, Submit(tag, pipeline, list(outputs), given, **more))

    def assigned(self, worker: bytes) -> list[Assign]:
        """The tasks that a worker was given since the last call."""
        return self.take(worker, Assign)

    def emit(self, worker: bytes, task: Assign, piece: Chunk) -> None:
        """A worker gives a chunk of a task."""
        self.say(worker, Emit(task.request, task.stage, task.attempt, piece))

    def finish(self, worker: bytes, task: Assign) -> None:
        """A worker ends a task."""
        self.say(worker, Finish(task.request, task.stage, task.attempt))

    def fail(self, worker: bytes, task: Assign, kind: str = "item", error: Any = None) -> None:
        """A worker gives a task up."""
        self.say(worker, Failed(task.request, task.stage, task.attempt, kind, error))  # type: ignore[arg-type]

    def die(self, worker: bytes, cause: str = "signal SIGKILL") -> None:
        """A guardian reports its engine's death."""
        self.say(guard(worker), Died(worker, cause))

    def tables(self) -> dict[str, int]:
        """What the core still keeps."""
        client = self.client("inspector")
        self.say(client, Inspect(1, "status"))
        report = self.take(client, Report)[-1]
        tables: dict[str, int] = msgspec.msgpack.decode(report.body)["tables"]
        return tables

    def assert_empty(self) -> None:
        """Nothing of any request is left."""
        assert not any(self.tables().values()), self.tables()
        for pipeline in self.core.board.pipelines.values():
            assert pipeline.unfinished == 0


def guard(worker: bytes) -> bytes:
    """The identity of a worker's guardian."""
    return b"g" + worker[1:]


def line(*stages: str, **settings: Any) -> Pipeline:
    """A pipeline whose stages follow each other: request -> first -> ... -> last, output "out"."""
    producers = ("request", *stages[:-1])
    document = {
        "name": "line",
        "outputs": {"out": stages[-1], **settings.pop("outputs", {})},
        "stages": {name: {"engine": "function", **settings} for name in stages},
        "edges": [{"from": a, "to": b} for a, b in zip(producers, stages, strict=True)],
    }
    return msgspec.convert(document, Pipeline)
