"""What goes into the core and what comes out of it.

Time is the shell's monotonic clock in seconds and comes in with each event, so a log of events replays a run
exactly.
"""

from __future__ import annotations

import msgspec

from broker.protocol import Message, Peer


class Received(msgspec.Struct, frozen=True, gc=False):
    """A peer's message has come."""

    now: float
    peer: Peer
    message: Message


class Lost(msgspec.Struct, frozen=True, gc=False):
    """A send found the peer gone (ZeroMQ's EHOSTUNREACH), which the core knew at that moment.

    Of strangers it says nothing: an engine that its guardian has spoken of is answered before it has a
    connection, and it may have one, and have reported, by the time this would be heard.
    """

    now: float
    peer: Peer


class Gone(msgspec.Struct, frozen=True, gc=False):
    """The process of a peer that the journal knows is not there any more."""

    now: float
    peer: Peer


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed; due about once a second."""

    now: float


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send this message."""

    peer: Peer
    message: Message


class Reap(msgspec.Struct, frozen=True, gc=False):
    """No block of this dead producer is needed any more: remove its arena."""

    arena: str


class Discard(msgspec.Struct, frozen=True, gc=False):
    """The request of this name needs none of its files in the disk store any more."""

    name: str


class SweepRun(msgspec.Struct, frozen=True, gc=False):
    """All who live have reported: memory of this run outside these arenas has no owner."""

    arenas: frozenset[str]


class Note(msgspec.Struct, frozen=True, gc=False):
    """Something a person may want to read: one line per request end, one per worker change."""

    level: int
    text: str  #: with %-placeholders for ``values``, filled in only where somebody listens
    values: tuple[object, ...] = ()


Event = Received | Lost | Gone | Tick
Instruction = Send | Reap | Discard | SweepRun | Note
