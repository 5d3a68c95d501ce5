"""What messages of both boundaries have in common, and those that cross both."""

from __future__ import annotations

import secrets

import msgspec

from adapters.handle import BlockId

VERSION = 4

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


class Beat(Message):
    """Sent every ``beat_s`` by guardians (with their living engines), by clients, and back by the broker.

    To a guardian the broker names the engines of it that have reported to be ready.
    """

    workers: list[Peer] = []


class Bye(Message):
    """The peer leaves on purpose. An engine finishes what it holds; the broker answers it with Drain."""


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


class Hosts(Message):
    """Where memory of other hosts can be read; comes at the beginning, and again when that changes.

    ``book``: a host, or a disk store, as :mod:`adapters.host` names them -> addresses of its data servers.
    """

    book: dict[str, list[str]]


class Free(Message):
    """Nobody needs these blocks of yours any more."""

    blocks: list[BlockId]
