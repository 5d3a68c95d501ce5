"""What guardians and engines say to the broker, and what it says to them alone."""

from __future__ import annotations

from typing import Literal

import msgspec

from adapters.handle import Chunk
from broker.protocol.shared import Error, Message, Peer
from pipelines.graph import Pipeline


class Lease(msgspec.Struct, array_like=True, gc=False):
    """A running attempt, as its engine announces it to a broker that was restarted."""

    request: int
    stage: int
    attempt: int
    inputs: list[tuple[int, int, bool]]  #: (edge, chunks received over it, whether its end was)


# --- guardian -> broker


class Hello(Message):
    """A guardian reports for duty."""

    version: int
    pipeline: str  #: "" means: the only one
    stage: str
    host: str
    pid: int
    device: str = "cpu"
    shm_host: str = ""  #: its shared memory, see :func:`adapters.host.this_host`
    store_host: str = ""  #: the disk store that its engines write to, where its data server serves one
    #: Addresses of its data server, for a second Hello: it knows its run only after the first
    data: list[str] = msgspec.field(default_factory=list)


class Left(Message):
    """What a guardian finds on its host: arenas whose owners are dead, requests that have files.

    The broker answers with Unlink of what it needs no longer. So it decides over things that were there
    before it did: a list of what is to be kept would be old when it arrives.
    """

    arenas: list[str]
    names: list[str]


class Died(Message):
    """A guardian saw its engine process exit."""

    worker: Peer
    cause: str  #: "signal SIGKILL", "exit code 3", "killed: attempt over its time limit", ...


# --- engine -> broker


class Ready(Message):
    """The engine has loaded. ``capacity`` is its credit: so many tasks it asks for, and one more as one ends.

    ``arena`` is its segments' prefix.
    """

    version: int
    guardian: Peer
    capacity: int
    pid: int
    arena: str = ""
    resumes: bool = False  #: the engine wants the bodies of chunks that earlier attempts got out
    #: What it runs already, when it introduces itself to a restarted broker.
    leases: list[Lease] = msgspec.field(default_factory=list)
    sent: int = 0  #: how many results (see Seen) it has sent in all before those that follow this message


class Emit(Message):
    """A chunk of a running task. With ``chunk.last`` set the task is finished too."""

    request: int
    stage: int
    attempt: int
    chunk: Chunk


class Finish(Message):
    """A running task has emitted everything (where ``last`` could not ride on a chunk)."""

    request: int
    stage: int
    attempt: int
    chunks: int = -1  #: in all, those of earlier attempts included; -1: not said


class Failed(Message):
    """A task ended early. "item": it raised; "drained": the worker leaves; "cancelled": as told."""

    request: int
    stage: int
    attempt: int
    kind: Literal["item", "drained", "cancelled"]
    error: Error | None = None


class Checkpoint(Message):
    """The engine's own state after chunk ``chunk.seq - 1``; replaces the one before."""

    request: int
    stage: int
    attempt: int
    chunk: Chunk


class Took(Message):
    """The engine's job has taken so many more chunks, of so many bytes together, from one of its edges."""

    request: int
    stage: int
    attempt: int
    edge: int
    chunks: int
    nbytes: int


# --- broker -> guardian and engine


class Welcome(Message):
    """Answer to Hello and to Ready: what to run."""

    version: int
    run: str  #: the broker run's nonce, part of every arena's name
    pipeline: Pipeline
    stage: str
    beat_s: float = 1.0
    boot: int = 0  #: differs for each broker process, also where ``run`` stays the same
    store: str = ""  #: the broker's, for :func:`adapters.store.open_store`; "": there is none
    shm_host: str = ""  #: the broker's; on any other, the folder is another one


class Seen(Message):
    """The broker has read and journalled so many of the engine's results, counted from its start.

    Results are Emit, Finish, Failed and Checkpoint messages. The engine need not keep those any more.
    """

    results: int


class Grant(Message):
    """The task may emit chunks whose ``seq`` is less than this, as long as the bytes allow it.

    ``nbytes`` bounds the sum over all chunks of the task since seq 0; one chunk may always pass that bound
    when its consumers have taken everything before it.
    """

    request: int
    stage: int
    attempt: int
    chunks: int
    nbytes: int


class Kill(Message):
    """To a guardian: kill this engine now and report its death with this cause."""

    worker: Peer
    cause: str


class Unlink(Message):
    """To a guardian of another host than the broker's: remove these there.

    ``arenas``: prefixes of dead producers whose blocks nobody needs. ``names``: requests of which nothing in
    the disk store is needed.
    """

    arenas: list[str]
    names: list[str]


class Sweep(Message):
    """To a guardian of another host: say what the run's dead have left there (:class:`Left`)."""


class Drain(Message):
    """Finish what you hold and leave: no task follows this message."""


class Resume(msgspec.Struct, array_like=True):
    """What earlier attempts left. The new attempt's first chunk has ``seq == emitted``."""

    emitted: int  #: chunks that the broker has
    bodies: list[msgspec.Raw]  #: their bodies, for engines that said ``resumes``; else empty
    checkpoint: Chunk | None = None


class EdgeInput(msgspec.Struct, array_like=True):
    """What has come over one edge so far. ``closed``: nothing more will."""

    edge: int
    chunks: list[Chunk]
    closed: bool


class Assign(Message):
    """Run this task."""

    request: int
    stage: int
    attempt: int
    params: msgspec.Raw  #: a msgpack map, the request's parameters for this stage
    seed: int
    inputs: list[EdgeInput]
    resume: Resume | None = None
    name: str = ""  #: the request's name: its folder in the disk store
    granted: tuple[int, int] = (1 << 60, 1 << 60)  #: as in Grant: (chunks, nbytes)
    consumers: list[int] = msgspec.field(default_factory=list)  #: stages of this request that get its chunks


class Input(Message):
    """More of a running task's inputs."""

    request: int
    stage: int
    attempt: int
    input: EdgeInput
    first: int  #: how many chunks of that edge came before these: an end alone shows a gap, too


class Cancel(Message):
    """Stop this task; answer Failed("cancelled")."""

    request: int
    stage: int
    attempt: int
