"""What the core decides, as it goes into the journal: replayed in order, these make the same requests again.

A record belongs to one request, or to one peer. The shell writes a :class:`Batch` before it sends anything
that follows from it, so whatever a peer has been told is in the journal.
"""

from __future__ import annotations

import msgspec

from adapters.handle import Chunk
from broker.protocol import Error, Peer, Submit, Timing


class Record(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base of all records; the tag is the class's name."""


# --- of a request


class Opened(Record):
    """It was accepted."""

    submit: Submit
    client: Peer  #: b"" for one that nobody waits for
    accepted: float  #: the shell's clock
    seed: int


class Joined(Record):
    """Another client has it now; b"": nobody."""

    client: Peer
    tag: int


class Leased(Record):
    """A worker got an attempt of one of its tasks."""

    stage: int
    attempt: int
    worker: Peer
    at: float = 0.0  #: the shell's clock


class Kept(Record):
    """A chunk of a task was taken."""

    stage: int
    chunk: Chunk


class Marked(Record):
    """A task's engine made a checkpoint."""

    stage: int
    chunk: Chunk


class Again(Record):
    """An attempt is over without success, and the task waits for another."""

    stage: int
    blame: int
    solo: bool


class Finished(Record):
    """A task is done."""

    stage: int


class Closed(Record):
    """The request is over."""

    status: str
    error: Error | None
    timings: list[Timing]
    at: float
    letter: bool = False  #: it goes to the dead letters


# --- of a peer


class GuardianMet(Record):
    """A guardian has come."""

    pipeline: str
    stage: str
    host: str
    pid: int
    device: str
    shm_host: str = ""
    store_host: str = ""
    data: list[str] = []


class WorkerMet(Record):
    """An engine has come."""

    guardian: Peer
    pid: int
    arena: str
    resumes: bool
    capacity: int


class ClientMet(Record):
    """A client has come."""

    kind: str
    arena: str
    shm_host: str = ""
    store_host: str = ""
    data: list[str] = []


OfRequest = Opened | Joined | Leased | Kept | Marked | Again | Finished | Closed
OfPeer = GuardianMet | WorkerMet | ClientMet


class Batch:
    """What is to be written at once: drops first, then the rest."""

    __slots__ = ("dropped", "peers", "requests")

    def __init__(self) -> None:
        self.dropped: set[int] = set()  #: requests whose earlier records go
        self.requests: dict[int, list[OfRequest]] = {}
        self.peers: dict[Peer, OfPeer | None] = {}  #: None: it has gone

    def __bool__(self) -> bool:
        return bool(self.requests or self.dropped or self.peers)


class Log:
    """Gathers records until the shell takes them. Disabled, it forgets them."""

    __slots__ = ("_batch", "enabled")

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._batch = Batch()

    def add(self, request: int, record: OfRequest) -> None:
        """One more record of a request."""
        if self.enabled:
            records = self._batch.requests.get(request)
            if records is None:
                self._batch.requests[request] = [record]
            else:
                records.append(record)

    def drop(self, request: int) -> None:
        """Nothing of this request's past is needed any more."""
        if self.enabled:
            self._batch.requests.pop(request, None)
            self._batch.dropped.add(request)

    def peer(self, peer: Peer, record: OfPeer | None) -> None:
        """A peer has come, or (None) gone."""
        if self.enabled:
            self._batch.peers[peer] = record

    def take(self) -> Batch:
        """What has gathered since the last call."""
        batch, self._batch = self._batch, Batch()
        return batch
