"""Every message that crosses a ZeroMQ socket, and the codecs for them.

Each frame is one msgpack array of messages: whoever wakes up sends each peer everything that is due to it
at once. A message is a tagged array, ``[tag, field, ...]``; unknown tags and wrong types are refused by the
decoder. A connection is DEALER to ROUTER, its identity a fresh random id per process (:func:`new_peer`),
and its first message names the protocol version.

    guardian  -> broker   Hello Beat Died Bye
    engine    -> broker   Ready Emit Finish Failed Checkpoint Took Release Resync Bye
    client    -> broker   Connect Beat Submit Attach Taken Abort Forget Release Resync Inspect Letters Bye
    broker    -> guardian Welcome Reject Who Beat Kill Drain
    broker    -> engine   Welcome Reject Who Seen Assign Input Grant Cancel Drain Free
    broker    -> client   Connected Reject Who Beat Busy Accepted Attached Refused Output Ended Report Free

A task is named (request, stage, attempt) everywhere: ``request`` is the broker's own number, ``stage`` the
position in ``Pipeline.order()``, ``attempt`` counts from 1.

**When the broker dies** and comes back, it knows from its journal all that it had read; what was under way
in either direction is lost. It sends Who with its new ``boot`` to every engine and client that it remembers.
These introduce themselves once per boot:

* an engine: Ready with the leases it holds; then again, in order, every Emit, Finish, Failed and Checkpoint
  that no Seen has covered; then Resync. The broker takes each chunk number of a task once, so what it had
  read already has no effect; it sends what a lease lacks (Input), and Cancel for a lease it does not want.
* a client: Connect; then again the Submit (or the Attach) of every request it has open, with ``received``;
  then Resync. A Submit whose ``name`` the broker knows continues that request, else it is a new one.

**Flow control.** A task may be ahead of the slowest consumer of its streaming edges and of its caller by
``limits.ahead_chunks`` chunks and ``limits.ahead_mb`` MiB; the first chunk beyond that waits in its worker
until a Grant. Consumers say what they have taken (Took, Taken) each time a quarter of that has gathered, so
short streams cost no message.
"""

from __future__ import annotations

import secrets
from typing import Literal

import msgspec

from adapters.handle import BlockId, Chunk
from pipelines.graph import Pipeline

VERSION = 2

Peer = bytes  #: a connection's ZeroMQ identity

NAME = r"[0-9A-Za-z_-]{8,64}"  #: a request's name; it is a folder's name in the disk store


def new_peer(kind: str) -> Peer:
    """A fresh identity; ``kind`` is one letter ("g"uardian, "w"orker, "c"lient) that helps reading logs."""
    return kind.encode() + secrets.token_bytes(9)


class Error(msgspec.Struct, array_like=True, gc=False):
    """Why a request was refused or ended. ``status`` is the HTTP status it stands for."""

    type: str  #: "invalid_request_error", "stage_failed", "worker_died", "timeout", "overloaded", ...
    message: str
    status: int = 500
    param: str | None = None
    retry_after_s: float | None = None
    stage: str | None = None
    attempts: int = 0


class Timing(msgspec.Struct, array_like=True, gc=False):
    """One task's life, in seconds since the request was accepted; -1: never happened."""

    stage: str
    queued: float = -1.0
    started: float = -1.0
    first_chunk: float = -1.0
    last_chunk: float = -1.0
    ended: float = -1.0
    chunks: int = 0
    attempts: int = 0


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base of all messages; the tag is the class's name."""


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


class Beat(Message):
    """Sent every ``beat_s`` by guardians (with their living engines), by clients, and back by the broker."""

    workers: list[Peer] = []


class Died(Message):
    """A guardian saw its engine process exit."""

    worker: Peer
    cause: str  #: "signal SIGKILL", "exit code 3", "killed: attempt over its time limit", ...


class Bye(Message):
    """The peer leaves on purpose. An engine finishes what it holds; the broker answers it with Drain."""


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
    leases: list[Lease] = []  #: what it runs already, when it introduces itself to a restarted broker
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


class Release(Message):
    """The sender looks at these blocks no longer (each was sent to it once per entry)."""

    blocks: list[BlockId]


class Resync(Message):
    """Ends an introduction to a restarted broker.

    ``holds``: the blocks of others that the sender was sent and has not released, one entry for each time.
    ``lent``: the sender's own blocks that it has sent in messages and that have not been freed.
    """

    holds: list[BlockId]
    lent: list[BlockId]
    boot: int = 0  #: of the broker that it is for: to a later one it says too little


# --- broker -> guardian and engine


class Welcome(Message):
    """Answer to Hello and to Ready: what to run."""

    version: int
    run: str  #: the broker run's nonce, part of every arena's name
    pipeline: Pipeline
    stage: str
    beat_s: float = 1.0
    boot: int = 0  #: differs for each broker process, also where ``run`` stays the same
    store: str = ""  #: the folder of the disk store; "": there is none


class Reject(Message):
    """The peer can't take part (wrong version, unknown pipeline or stage); it should exit with this."""

    reason: str


class Who(Message):
    """Introduce yourself, if you have not done so to this ``boot`` of the broker.

    ``gone``: the broker had met you and has given you up, so what you still hold belongs to others. An engine
    ends then; a guardian and a client begin anew.
    """

    boot: int = 0
    gone: bool = False


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
    consumers: list[int] = []  #: the stages of this request that get its chunks


class Input(Message):
    """More of a running task's inputs."""

    request: int
    stage: int
    attempt: int
    input: EdgeInput


class Cancel(Message):
    """Stop this task; answer Failed("cancelled")."""

    request: int
    stage: int
    attempt: int


class Free(Message):
    """Nobody needs these blocks of yours any more."""

    blocks: list[BlockId]


# --- client -> broker


class Connect(Message):
    """A client reports."""

    version: int
    kind: str  #: "gateway", "api", "cli"
    arena: str = ""
    met: int = 0  #: the boot of the last broker process that it was connected to


class Submit(Message):
    """A new request. ``tag`` is the client's own number for it on this connection.

    ``name`` is drawn by the client and names the request for ever; a second Submit of one name, by whatever
    client, continues the request instead: outputs from ``received`` on, and its end.
    """

    tag: int
    pipeline: str
    outputs: list[str]
    given: dict[str, list[Chunk]]  #: producer ("request" or a stage) -> its whole output
    params: dict[str, msgspec.Raw] = {}  #: stage -> msgpack map
    has: list[str] = []  #: input modalities, for stages with `when`
    seed: int | None = None  #: absent: the broker draws one, so that retries repeat it
    priority: int = 0  #: lower runs first
    deadline_s: float | None = None
    tenant: str = ""
    name: str = ""  #: NAME, or "": the broker makes one up, and the request can't be continued
    received: dict[str, int] = {}  #: output -> chunks that the client has
    stored: bool = False  #: it goes on without a client, and is kept for a while after its end
    call: bytes = b""  #: the client's own notes, given to whoever attaches


class Attach(Message):
    """Continue a request that was submitted earlier, perhaps by another client. Answered by Attached."""

    tag: int
    name: str
    received: dict[str, int] = {}


class Taken(Message):
    """The caller has taken so many more chunks, of so many bytes together, of one output."""

    tag: int
    output: str
    chunks: int
    nbytes: int


class Abort(Message):
    """The caller has gone, or wants no more. By tag, so that it works before Accepted arrives.

    ``leave``: a stored request goes on without it.
    """

    tag: int
    leave: bool = False


class Forget(Message):
    """The caller has everything: an ended request that is not stored may be forgotten."""

    tag: int


class Letters(Message):
    """The dead-letter list, answered by Report. ``act``: "list", "show", "retry" or "drop" of one name."""

    tag: int
    act: Literal["list", "show", "retry", "drop"]
    name: str = ""


class Inspect(Message):
    """Asks for a Report. ``what``: "status", "metrics", "ready", or "request" of a name."""

    tag: int
    what: str
    name: str = ""


# --- broker -> client


class Connected(Message):
    """Answer to Connect."""

    version: int
    run: str
    pipelines: list[Pipeline]
    beat_s: float = 1.0
    boot: int = 0  #: differs for each broker process, also where ``run`` stays the same
    store: str = ""  #: the folder of the disk store; "": there is none


class Busy(Message):
    """The pipeline takes nothing now; ``retry_after_s`` 0: it does again. Sent when that changes."""

    pipeline: str
    retry_after_s: float


class Accepted(Message):
    """The request is the broker's now, under this number."""

    tag: int
    request: int


class Attached(Message):
    """Answer to Attach: the request is this client's now; outputs and the end follow."""

    tag: int
    request: int
    pipeline: str
    outputs: list[str]
    call: bytes


class Refused(Message):
    """The request was not accepted; nothing of it is kept."""

    tag: int
    error: Error


class Output(Message):
    """A chunk of one of the request's outputs."""

    tag: int
    output: str
    chunk: Chunk


class Ended(Message):
    """The request is over. Exactly one per accepted request; nothing of it follows."""

    tag: int
    status: Literal["done", "failed", "cancelled"]
    error: Error | None
    timings: list[Timing]


class Report(Message):
    """Answer to Inspect."""

    tag: int
    body: msgspec.Raw


FromWorker = Hello | Beat | Died | Bye | Ready | Emit | Finish | Failed | Checkpoint | Took | Release | Resync
ToWorker = Welcome | Reject | Who | Beat | Kill | Seen | Assign | Input | Grant | Cancel | Drain | Free
FromClient = (
    Connect | Beat | Submit | Attach | Taken | Abort | Forget | Release | Resync | Inspect | Letters | Bye
)
ToClient = (
    Connected | Reject | Who | Beat | Busy | Accepted | Attached | Refused | Output | Ended | Report | Free
)

encode = msgspec.msgpack.Encoder().encode
decode_from_worker = msgspec.msgpack.Decoder(list[FromWorker]).decode
decode_to_worker = msgspec.msgpack.Decoder(list[ToWorker]).decode
decode_from_client = msgspec.msgpack.Decoder(list[FromClient]).decode
decode_to_client = msgspec.msgpack.Decoder(list[ToClient]).decode
