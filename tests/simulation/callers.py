"""A client process with several requests; checks that each output comes whole and in order."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from broker.protocol import VERSION, Accepted, Connect, Ended, Free, Message, Output, Peer, Submit
from tests.simulation.graphs import content, pick
from tests.simulation.peers import Producer

if TYPE_CHECKING:
    from tests.simulation.world import World


class Call:
    """What a caller knows of one request."""

    def __init__(self, outputs: list[str]) -> None:
        self.outputs: dict[str, list[int]] = {name: [] for name in outputs}
        self.number = 0
        self.ended: str | None = None


class Caller(Producer):
    def __init__(self, world: World, peer: Peer) -> None:
        super().__init__(world, peer)
        self.calls: dict[int, Call] = {}
        self.send(Connect(VERSION, "api", self.arena))

    def submit(self, rng: random.Random, tag: int) -> None:
        """A new request."""
        pipeline = self.world.pipeline
        outputs = rng.sample(sorted(pipeline.outputs), 1 + pick(rng, len(pipeline.outputs)))
        given = {"request": [self.chunk(0, pick(rng, 1 << 30), last=True)]}
        self.calls[tag] = Call(outputs)
        self.send(Submit(tag, "p", outputs, given, priority=pick(rng, 3), tenant=str(tag % 3)))

    def on(self, m: Message) -> None:
        """A message of the broker's has come."""
        if isinstance(m, Output):
            call = self.calls[m.tag]
            assert call.ended is None, "an output after the end"
            got = call.outputs[m.output]
            assert m.chunk.seq == len(got), "an output chunk is missing or doubled"
            got.append(self.see(m.chunk))
            self.release([handle.block for handle in m.chunk.handles])
        elif isinstance(m, Accepted):
            self.calls[m.tag].number = m.request
        elif isinstance(m, Ended):
            call = self.calls[m.tag]
            assert call.ended is None, "two ends"
            call.ended = m.status
            if m.status == "done":
                self._check(call)
        elif isinstance(m, Free):
            self.freed(m)

    def _check(self, call: Call) -> None:
        for output, got in call.outputs.items():
            stage = self.world.order.index(self.world.pipeline.outputs[output])
            assert got == content(call.number, stage), "an output is not whole"
