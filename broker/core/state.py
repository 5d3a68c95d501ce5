"""The things the core keeps: requests, tasks, workers, guardians, clients."""

from __future__ import annotations

from collections import deque

from msgspec import Raw

from adapters.handle import Chunk
from broker.core.lifecycle import TaskState
from broker.core.routes import Route, Router
from broker.core.scheduling import Scheduler
from broker.core.stats import StageStats
from broker.protocol import Error, Peer, Timing
from pipelines.graph import Pipeline, Stage


class Feed:
    """What has come over one inlet of a task, kept until the task is done so that it can run again."""

    __slots__ = ("chunks", "closed", "edge", "stream")

    def __init__(self, edge: int, stream: bool) -> None:
        self.edge = edge
        self.stream = stream
        self.chunks: list[Chunk] = []
        self.closed = False


class Task:
    """The work of one stage for one request."""

    __slots__ = (
        "attempt",
        "blame",
        "bodies",
        "checkpoint",
        "emitted",
        "feeds",
        "key",
        "queued",
        "request",
        "solo",
        "stage",
        "started",
        "state",
        "stopped",
        "timed_out",
        "timing",
        "worker",
    )

    def __init__(self, request: Request, stage: StageState, feeds: list[Feed]) -> None:
        self.request = request
        self.stage = stage
        self.key = (request.number, stage.number)  #: its name among its worker's tasks
        self.feeds = feeds
        self.state = TaskState.WAITING
        self.attempt = 0
        self.blame = 0  #: attempts that count against the stage's limit
        self.solo = False  #: a worker died with it and others: it runs alone now, to find out who did it
        self.timed_out = False
        self.worker: Worker | None = None
        self.emitted = 0
        self.bodies: list[Chunk] = []
        self.checkpoint: Chunk | None = None
        self.timing = Timing(stage.name)
        self.queued = self.started = self.stopped = 0.0  #: the last time each; ``stopped``: told to

    def ready(self) -> bool:
        """Whether a worker could begin: every streaming inlet has something, every other one is complete."""
        for feed in self.feeds:  # noqa: SIM110 - this runs for every chunk, and all(...) takes three times as long
            if not feed.closed and not (feed.stream and feed.chunks):
                return False
        return True


class Request:
    """One call of a user."""

    __slots__ = (
        "accepted",
        "client",
        "deadline",
        "number",
        "open",
        "params",
        "pipeline",
        "priority",
        "route",
        "seed",
        "tag",
        "tasks",
        "tenant",
    )

    def __init__(self, number: int, client: Client, tag: int, pipeline: PipelineState, *, now: float) -> None:
        self.number = number
        self.client = client
        self.tag = tag
        self.pipeline = pipeline
        self.accepted = now
        self.route: Route
        self.params: dict[str, Raw] = {}
        self.seed = 0
        self.priority = 0
        self.deadline: float | None = None
        self.tenant = ""
        self.tasks: dict[int, Task] = {}
        self.open = 0  #: tasks not done

    @property
    def name(self) -> tuple[int, str]:
        """Its number and pipeline, for the log."""
        return (self.number, self.pipeline.name)


class Worker:
    """One engine process."""

    __slots__ = (
        "arena",
        "credit",
        "draining",
        "guardian",
        "peer",
        "pid",
        "resumes",
        "since",
        "stage",
        "tasks",
    )

    def __init__(self, peer: Peer, stage: StageState, guardian: Guardian, now: float) -> None:
        self.peer = peer
        self.stage = stage
        self.guardian = guardian
        self.since = now
        self.pid = 0
        self.arena = ""
        self.resumes = False
        self.credit = 0
        self.draining = False
        self.tasks: dict[tuple[int, int], Task] = {}


class Guardian:
    """A guardian process: it stands for the workers it started."""

    __slots__ = ("dead", "device", "host", "peer", "pid", "seen", "since", "stage", "workers")

    def __init__(self, peer: Peer, stage: StageState, now: float) -> None:
        self.peer = peer
        self.stage = stage
        self.since = self.seen = now
        self.host = ""
        self.pid = 0
        self.device = ""
        self.workers: dict[Peer, Worker] = {}
        self.dead: deque[Peer] = deque(maxlen=64)  #: engines whose death came before their Ready


class Client:
    """A gateway, a command line or a Python program."""

    __slots__ = ("arena", "kind", "peer", "requests", "seen")

    def __init__(self, peer: Peer, kind: str, now: float) -> None:
        self.peer = peer
        self.kind = kind
        self.arena = ""
        self.seen = now
        self.requests: dict[int, Request] = {}  #: by the client's tag


class StageState:
    """A stage's queue, workers and figures."""

    __slots__ = ("guardians", "name", "number", "pipeline", "scheduler", "spec", "stats", "workers")

    def __init__(self, pipeline: PipelineState, number: int, name: str, spec: Stage) -> None:
        self.pipeline = pipeline
        self.number = number
        self.name = name
        self.spec = spec
        self.scheduler = Scheduler()
        self.stats = StageStats()
        self.workers: dict[Peer, Worker] = {}
        self.guardians: dict[Peer, Guardian] = {}

    @property
    def running(self) -> int:
        """Tasks that workers have."""
        return sum(len(w.tasks) for w in self.workers.values())


class PipelineState:
    """A pipeline that this broker serves."""

    __slots__ = ("name", "router", "spec", "stages", "unfinished")

    def __init__(self, spec: Pipeline) -> None:
        self.spec = spec
        self.name = spec.name
        self.router = Router(spec)
        self.unfinished = 0
        self.stages = [
            StageState(self, i, name, spec.stages[name]) for i, name in enumerate(self.router.order)
        ]


def failure(kind: str, message: str, task: Task, status: int = 500) -> Error:
    """The error of a request that ended in this task."""
    return Error(kind, message, status, stage=task.stage.name, attempts=task.attempt)
