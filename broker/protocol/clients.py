"""What clients say to the broker, and what it says to them alone."""

from __future__ import annotations

from typing import Literal

import msgspec

from adapters.handle import Chunk
from broker.protocol.shared import Error, Message, Timing
from pipelines.graph import Pipeline

# --- client -> broker


class Connect(Message):
    """A client reports."""

    version: int
    kind: str  #: "gateway", "api", "cli"
    arena: str = ""
    met: int = 0  #: the boot of the last broker process that it was connected to
    shm_host: str = ""  #: its shared memory, see :func:`adapters.host.this_host`
    store_host: str = ""  #: the disk store that it writes to, where its data server serves one
    data: list[str] = msgspec.field(default_factory=list)  #: addresses of its data server


class Submit(Message):
    """A new request. ``tag`` is the client's own number for it on this connection.

    ``name`` is drawn by the client and names the request for ever; a second Submit of one name, by whatever
    client, continues the request instead: outputs from ``received`` on, and its end.
    """

    tag: int
    pipeline: str
    outputs: list[str]
    given: dict[str, list[Chunk]]  #: producer ("request" or a stage) -> its whole output
    params: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)  #: stage -> msgpack map
    has: list[str] = msgspec.field(default_factory=list)  #: input modalities, for stages with `when`
    seed: int | None = None  #: absent: the broker draws one, so that retries repeat it
    priority: int = 0  #: lower runs first
    deadline_s: float | None = None
    tenant: str = ""
    name: str = ""  #: NAME, or "": the broker makes one up, and the request can't be continued
    received: dict[str, int] = msgspec.field(default_factory=dict)  #: output -> chunks that the client has
    stored: bool = False  #: it goes on without a client, and is kept for a while after its end
    call: bytes = b""  #: the client's own notes, given to whoever attaches
    keep_s: float | None = None  #: how long a stored one is kept after its end; None: as all others are


class Attach(Message):
    """Continue a request that was submitted earlier, perhaps by another client. Answered by Attached."""

    tag: int
    name: str
    received: dict[str, int] = msgspec.field(default_factory=dict)


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
    """Asks for a Report. ``what``: "status", "metrics", "ready", "request" of a name, or the "stored"
    requests of a tenant (in the place of the name)."""

    tag: int
    what: str
    name: str = ""


class Unplaced(Message):
    """From whoever starts workers: the stages ("pipeline/stage") that can't have all they should, and why.

    Said when that changes; it takes the place of what was said before.
    """

    stages: dict[str, str]


# --- broker -> client


class Connected(Message):
    """Answer to Connect."""

    version: int
    run: str
    pipelines: list[Pipeline]
    beat_s: float = 1.0
    boot: int = 0  #: differs for each broker process, also where ``run`` stays the same
    store: str = ""  #: the broker's, for :func:`adapters.store.open_store`; "": there is none
    shm_host: str = ""  #: the broker's; on any other, the folder is another one


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
