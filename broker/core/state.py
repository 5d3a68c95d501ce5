"""The things the core keeps: requests, tasks, workers, guardians, clients."""

from __future__ import annotations

from collections import deque

from adapters.handle import Chunk, Handle
from broker.core.ahead import UNLIMITED, Gauge, Granted, first_grant
from broker.core.lifecycle import TaskState
from broker.core.records import GuardianMet
from broker.core.routes import Inlet, Route, Router
from broker.core.scaling import Scaler
from broker.core.scheduling import Scheduler
from broker.core.stats import StageStats
from broker.protocol import Ended, Error, Peer, Submit, Timing
from pipelines.graph import Pipeline, Stage


class Feed:
    """What has come over one inlet of a task, kept until the task is done so that it can run again."""

    __slots__ = ("chunks", "closed", "edge", "forgets", "gauge", "gone", "producer", "stream")

    def __init__(self, inlet: Inlet) -> None:
        self.edge = inlet.edge
        self.stream = inlet.stream
        self.producer = inlet.producer  #: its stage; None: the caller
        self.forgets = inlet.forgets  #: keeps nothing that was delivered (checkpoint: none)
        self.gone = 0  #: chunks that were delivered and are not kept
        self.chunks: list[Chunk] = []
        self.closed = False
        self.gauge: Gauge | None = None  #: None until its producer has sent more than one chunk


class Task:
    """The work of one stage for one request."""

    __slots__ = (
        "attempt",
        "blame",
        "bodies",
        "boost",
        "checkpoint",
        "emitted",
        "feeds",
        "gauges",
        "granted",
        "key",
        "last",
        "nbytes",
        "proved",
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
        self.solo = False  #: a worker died with it and others: it is tried alone, to find out who did it
        self.proved = False  #: this attempt has given something, so it is not suspected
        self.timed_out = False
        self.worker: Worker | None = None
        self.emitted = 0
        self.bodies: list[Chunk] = []
        self.checkpoint: Chunk | None = None
        self.gauges: list[Gauge] | None = None  #: those of its streaming consumers and of its caller
        self.granted: Granted = UNLIMITED
        self.nbytes = 0  #: emitted by this attempt
        self.boost = 1  #: of the limits on being ahead
        self.last = 0.0  #: when this attempt's latest chunk came, or it began
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
        "ended",
        "files",
        "gauges",
        "left",
        "letter",
        "number",
        "open",
        "outputs",
        "pipeline",
        "progress",
        "route",
        "seed",
        "submit",
        "tag",
        "tasks",
    )

    def __init__(
        self, number: int, submit: Submit, pipeline: PipelineState, route: Route, now: float
    ) -> None:
        self.number = number
        self.submit = submit
        self.pipeline = pipeline
        self.route = route
        self.accepted = self.progress = now  #: ``progress``: the last time a chunk came or a task ended
        self.client: Client | None = None
        self.tag = 0  #: the client's number for it
        self.seed = 0
        self.deadline = None if submit.deadline_s is None else now + submit.deadline_s
        self.tasks: dict[int, Task] = {}
        self.open = 0  #: tasks not done
        self.outputs: list[tuple[str, Chunk]] = []  #: what the caller was sent, for one that comes back
        self.gauges: dict[str, Gauge] = {}  #: of the caller, by output
        self.ended: Ended | None = None
        self.left = 0.0  #: when it ended, or its client left
        self.letter = False  #: it is among the dead letters
        self.files = False  #: the disk store may hold some of its tensors

    @property
    def name(self) -> str:
        """What the client calls it; "" if it can't be continued."""
        return self.submit.name

    def note_files(self, handles: list[Handle]) -> None:
        """Tensors of it have come; those in the disk store have to go when it is forgotten."""
        self.files = self.files or any(handle.file for handle in handles)

    @property
    def listener(self) -> Client | None:
        """The client, unless it has yet to say, after the broker's restart, what it lacks."""
        client = self.client
        return None if client is None or self.tag in client.unclaimed else client

    @property
    def keeps(self) -> bool:
        """Whether its outputs are kept for a client that comes back."""
        return bool(self.name) and (self.pipeline.keeps or self.submit.stored)

    @property
    def line(self) -> tuple[int, str]:
        """Its number and pipeline, for the log."""
        return (self.number, self.pipeline.name)


class Worker:
    """One engine process."""

    __slots__ = (
        "arena",
        "broken",
        "capacity",
        "credit",
        "doomed",
        "draining",
        "ghost",
        "guardian",
        "peer",
        "pid",
        "results",
        "resumes",
        "seen",
        "since",
        "stage",
        "strays",
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
        self.capacity = 0
        self.credit = 0
        self.draining = False
        self.broken = False  #: its connection broke; what it says now may miss a part
        self.doomed = ""  #: why its guardian was told to kill it
        self.ghost = False  #: known from the journal alone; it has not introduced itself
        self.results = 0  #: messages with results that it has sent
        self.seen = 0  #: of these, how many it knows that we have read
        self.tasks: dict[tuple[int, int], Task] = {}
        self.strays: dict[tuple[int, int, int], float] = {}  #: attempts that it is to stop, told when


class Guardian:
    """A guardian process: it stands for the workers it started."""

    __slots__ = (
        "data",
        "dead",
        "device",
        "ghost",
        "host",
        "peer",
        "pid",
        "seen",
        "shm_host",
        "since",
        "stage",
        "store_host",
        "workers",
    )

    def __init__(self, peer: Peer, stage: StageState, now: float) -> None:
        self.peer = peer
        self.stage = stage
        self.since = self.seen = now
        self.host = ""
        self.pid = 0
        self.device = ""
        self.shm_host = self.store_host = ""  #: see :mod:`adapters.host`
        self.data: list[str] = []  #: addresses of its data server
        self.ghost = False  #: known from the journal alone; it has not spoken yet
        self.workers: dict[Peer, Worker] = {}
        self.dead: deque[Peer] = deque(maxlen=64)  #: engines whose death came before their Ready

    def introduce(self, met: GuardianMet) -> None:
        """What it says of itself."""
        self.host, self.pid, self.device = met.host, met.pid, met.device
        self.shm_host, self.store_host, self.data = met.shm_host, met.store_host, met.data


class Client:
    """A gateway, a command line or a Python program."""

    __slots__ = (
        "arena",
        "data",
        "kind",
        "peer",
        "requests",
        "seen",
        "shm_host",
        "store_host",
        "unclaimed",
        "unplaced",
    )

    def __init__(self, peer: Peer, kind: str, now: float) -> None:
        self.peer = peer
        self.kind = kind
        self.arena = ""
        self.shm_host = self.store_host = ""
        self.data: list[str] = []
        self.seen = now
        self.requests: dict[int, Request] = {}  #: by the client's tag
        self.unclaimed: set[int] = set()  #: tags that it has not named again since the broker's restart
        self.unplaced: dict[str, str] = {}  #: "pipeline/stage" -> why it can't start the workers it should


class StageState:
    """A stage's queue, workers and figures."""

    __slots__ = (
        "guardians",
        "name",
        "number",
        "pipeline",
        "progress",
        "scaler",
        "scheduler",
        "spec",
        "stats",
        "workers",
    )

    def __init__(self, pipeline: PipelineState, number: int, name: str, spec: Stage) -> None:
        self.pipeline = pipeline
        self.number = number
        self.name = name
        self.spec = spec
        self.scheduler = Scheduler()
        self.scaler = Scaler(spec.resources)
        self.stats = StageStats()
        self.workers: dict[Peer, Worker] = {}
        self.guardians: dict[Peer, Guardian] = {}
        self.progress = 0.0  #: the last time a chunk came out of it, or a task ended

    @property
    def label(self) -> str:
        """What people call it: "pipeline/stage"."""
        return f"{self.pipeline.name}/{self.name}"

    @property
    def running(self) -> int:
        """Tasks that workers have."""
        return sum(len(w.tasks) for w in self.workers.values())


class PipelineState:
    """A pipeline that this broker serves."""

    __slots__ = (
        "busy",
        "durable",
        "first_grant",
        "keeps",
        "last_end",
        "name",
        "pace",
        "router",
        "spec",
        "stages",
        "unfinished",
    )

    def __init__(self, spec: Pipeline) -> None:
        self.spec = spec
        self.name = spec.name
        self.router = Router(spec)
        self.keeps = any(edge.checkpoint != "none" for edge in spec.edges)
        self.first_grant = first_grant(spec.limits)
        #: Something of a request may be in the store that we never heard of: it was cancelled just then
        self.durable = any(edge.checkpoint == "disk" or edge.transport == "mooncake" for edge in spec.edges)
        self.unfinished = 0
        self.busy = False  #: gateways were told that nothing more is taken
        self.pace = 0.0  #: seconds between two ends, a moving average
        self.last_end = 0.0
        self.stages = [
            StageState(self, i, name, spec.stages[name]) for i, name in enumerate(self.router.order)
        ]


def failure(kind: str, message: str, task: Task, status: int = 500) -> Error:
    """The error of a request that ended in this task."""
    return Error(kind, message, status, stage=task.stage.name, attempts=task.attempt)
