"""A client process: carries users' calls, reads outputs slowly, and goes on at a broker that returns."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from broker.protocol import (
    VERSION,
    Abort,
    Accepted,
    Attach,
    Attached,
    Beat,
    Connect,
    Connected,
    Ended,
    Forget,
    Free,
    Letters,
    Message,
    Output,
    Peer,
    Refused,
    Submit,
    Who,
)
from broker.receiving import Receiving
from broker.session import Session
from tests.simulation.calls import Call
from tests.simulation.graphs import pick
from tests.simulation.memory import Gone
from tests.simulation.peers import Producer, value_of

if TYPE_CHECKING:
    from tests.simulation.world import World


class Stream(Receiving):
    """A call as its client process knows it."""

    def __init__(self, call: Call, opening: Submit | Attach) -> None:
        super().__init__(opening, call.world.pipeline.limits)
        self.call = call
        self.number = call.number  #: the broker's for it
        self.end: Ended | None = None  #: as the broker has told it

    def reattach(self) -> Submit | Attach | None:
        self.end = None
        return super().reattach()


class Client(Producer):
    """A gateway, or a program with an API client ("api"): when that dies, nobody comes back for its calls."""

    def __init__(self, world: World, peer: Peer, kind: str) -> None:
        super().__init__(world, peer)
        self.kind = kind
        self.session = Session()
        self.streams: dict[int, Stream] = {}
        self.introducing = ""
        self._tags = 0
        self.send(Connect(VERSION, kind))

    def say_beat(self) -> None:
        """Due now and then."""
        self.beat(Beat())

    # --- what users want

    def submit(self, rng: random.Random, call: Call, **more: object) -> None:
        """A new request."""
        value = pick(rng, 1 << 30)
        durable = self.world.pipeline.durable("request")
        handles = [self.world.memory.put(self.arena, call.name, durable=durable)] if value % 2 else []
        self.session.lend(handles)
        self.world.given[call.name] = value
        given = {"request": [self.chunk(0, value, handles, last=True)]}
        self._tags += 1
        outputs = list(call.outputs)
        submit = Submit(
            self._tags,
            "p",
            outputs,
            given,
            name=call.name,
            stored=call.stored,
            call=b"x",
            **more,  # type: ignore[arg-type]
        )
        self._open(call, submit)

    def attach(self, call: Call) -> None:
        """A user has come back for a call."""
        call.kinds.add(self.kind)
        call.contested = call.contested or call.sure
        self._tags += 1
        received = {output: len(values) for output, values in call.outputs.items()}
        for output, chunks in received.items():
            self.world.broker.flow.output(call.number, output, chunks)
        self._open(call, Attach(self._tags, call.name, received))

    def _open(self, call: Call, opening: Submit | Attach) -> None:
        stream = self.streams[opening.tag] = call.stream = Stream(call, opening)
        if not self.introducing:
            self.send(stream.opening)

    def close(self, tag: int, farewell: Abort | Forget) -> None:
        """Nobody reads this stream any more."""
        stream = self.streams.pop(tag)
        self.send(farewell)
        for _, chunk in stream.waiting:
            self.release([handle.block for handle in chunk.handles])

    def drop_letters(self) -> None:
        """A person has seen enough of the dead letters."""
        self._tags += 1
        self.send(Letters(self._tags, "drop", "all"))

    def letters(self, rng: random.Random, name: str) -> None:
        """A person looks at the dead letters."""
        self._tags += 1
        self.send(Letters(self._tags, rng.choice(["list", "show", "retry", "drop"]), name))

    # --- one step: a user reads

    @property
    def has_work(self) -> bool:
        return bool(self.streams)

    def can_step(self) -> bool:
        return any(stream.waiting or stream.ended for stream in self.streams.values())

    def step(self, rng: random.Random) -> None:
        """A user takes one chunk, or the end."""
        tags = [tag for tag, stream in self.streams.items() if stream.waiting or stream.ended]
        if not tags:
            return
        tag = tags[pick(rng, len(tags))]
        stream = self.streams[tag]
        if stream.waiting:
            self._take(tag, stream)
            return
        assert stream.end is not None
        call, error = stream.call, stream.end.error
        self.close(tag, Forget(tag))
        call.forgotten = True
        if error is not None and error.type == "taken_over":
            assert call.contested, "nobody had taken it over"
            if call.stream is stream:  # the other one was late; its user comes back
                call.stream, call.left = None, self.world.now
        elif call.stream is stream:
            if stream.end.status == "cancelled" and self.suspected is not None:
                call.left = self.suspected
                call.cancelled()
            else:
                call.finish(stream.end.status, error)

    def _take(self, tag: int, stream: Stream) -> None:
        output, chunk, taken = stream.take()
        blocks = [handle.block for handle in chunk.handles]
        try:
            self.views.open(chunk)
        except Gone:
            call = stream.call
            superseded = call.contested or call.stream is not stream  # another client took it over, and left
            unwanted = self.suspected is not None or call.forgotten or superseded
            assert unwanted, "an output's block is gone while its client lives"
            self.release(blocks)
            self.world.dropped(stream)
            self.close(tag, Abort(tag))
            return
        for block in blocks:
            self.views.close(block)
        self.release(blocks)
        if stream.call.stream is stream:
            stream.call.got(output, chunk.seq, value_of(chunk))
        self.world.broker.flow.output(stream.number, output, chunk.seq + 1)
        if taken is not None:
            self.send(taken)

    # --- what the broker says

    def on(self, m: Message) -> None:
        if isinstance(m, Output):
            self._on_output(m)
        elif isinstance(m, Free):
            self.freed(m)
        elif isinstance(m, Accepted | Attached):
            self._on_accepted(m)
        elif isinstance(m, Ended):
            if (stream := self.streams.get(m.tag)) is not None:
                # A second introduction asks for a second end.
                assert stream.end is None or self.world.broker.boot > 1, "two ends"
                stream.ended, stream.end = True, stream.end or m
        elif isinstance(m, Refused):
            self._on_refused(m)
        elif isinstance(m, Connected):
            self._on_connected(m)
        elif isinstance(m, Who):
            self._on_who(m)

    def _on_output(self, m: Output) -> None:
        self.session.received(m.chunk.handles)
        stream = self.streams.get(m.tag)
        had = stream.received.get(m.output, 0) if stream is not None else 0
        if stream is None or not stream.push(m.output, m.chunk):
            self.release([handle.block for handle in m.chunk.handles])
            return
        assert m.chunk.seq == had, "an output chunk is missing"
        # A second introduction asks for it all again.
        assert not stream.ended or self.world.broker.boot > 1, "an output after the end"

    def _on_accepted(self, m: Accepted | Attached) -> None:
        stream = self.streams.get(m.tag)
        if stream is None:
            return
        stream.accepted, stream.number = True, m.request
        if stream.call.stream is stream:
            stream.call.accepted(m.request)

    def _on_refused(self, m: Refused) -> None:
        stream = self.streams.get(m.tag)
        if stream is None or stream.ended:
            return
        del self.streams[m.tag]
        for _, chunk in stream.waiting:
            self.release([handle.block for handle in chunk.handles])
        if stream.call.stream is stream:
            stream.call.stream = None
            stream.call.refused(m.error)

    # --- a broker that comes back

    def _on_who(self, m: Who) -> None:
        act = self.session.introduce(m)
        if act == "ignore":
            return
        self.introducing = "gone" if self.introducing == "gone" else act
        self.restart_connection()
        met = self.session.boot if self.introducing == "introduce" and self.arena else 0
        self.send(Connect(VERSION, self.kind, met=met))

    def _on_connected(self, m: Connected) -> None:
        act, self.introducing = self.introducing, ""
        if act or not self.session.boot:  # else its answer to what was for another; its Who will follow
            self.session.met(m.boot)
        if act == "gone" or not self.arena:
            self.session.begin_anew()
            self.views.die()
            self.open_arena()
            self.send(Connect(VERSION, self.kind, self.arena, self.session.boot))
        if act:
            self._reopen(known=act == "introduce")

    def _reopen(self, *, known: bool) -> None:
        if known:
            self.send(Connect(VERSION, self.kind, self.arena, self.session.boot))
        for tag, stream in list(self.streams.items()):
            if stream.ended and not known and not stream.holds:
                continue
            if not known and stream.call.left is None:
                assert self.suspected is not None, "a living client was given up"
                stream.call.left = self.suspected
            opening = stream.reopen() if known else stream.reattach()
            for output, chunks in stream.received.items():
                self.world.broker.flow.output(stream.number, output, chunks)
            if opening is None:
                del self.streams[tag]
                self.world.dropped(stream)
            else:
                self.send(opening)
        if known:
            self.send(self.session.resync())
