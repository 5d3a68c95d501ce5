"""The way of chunks into an engine: unpacked, through the edge's transfer adapter, cut into windows.

Those of other hosts are brought here first (:mod:`workers.arrivals`).

What a job takes is measured where chunks leave their edge, before adapters and windows.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import cache, partial

from adapters.chunk import Chunk, Payload, unpack
from adapters.handle import AdapterError, BlockId, Transport, blocks_of, size_of
from adapters.let_go import let_go
from adapters.window import windows
from broker.abroad import Abroad
from broker.protocol import EdgeInput
from pipelines.graph import Edge, Pipeline
from workers.arrivals import Arrivals
from workers.engine import Stream

Transfer = Callable[[AsyncIterator[Payload]], AsyncIterator[Payload]]


class TransferError(Exception):
    """A transfer adapter that isn't there; the message names it."""


@cache
def find_transfer(name: str) -> Transfer:
    """The function that "module:function" names. Raises TransferError."""
    module, _, function = name.partition(":")
    try:
        transfer: Transfer = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise TransferError(f"transfer adapter {name!r}: {error}") from error
    return transfer


class _Meter:
    """What a job takes from one edge. Knows nothing of its stream, whose tensors must go with the stream."""

    __slots__ = (
        "_bound",
        "_nbytes",
        "_report",
        "_sizes",
        "_taken",
        "_unmeasured",
        "arrivals",
        "closed",
        "failed",
    )

    def __init__(self, bound: tuple[float, float], report: Callable[[int, int], None]) -> None:
        self.closed = False  #: nothing more comes, so nobody waits to hear what was taken
        self.failed = False  #: a chunk can't be read, so those after it must not be either: one is missing
        self.arrivals: Arrivals | None = None  #: those that come from other hosts
        self._bound = bound
        self._report = report
        self._sizes: deque[int] = deque()  #: of the chunks that wait
        self._unmeasured = 0  #: of these, how many the broker takes for taken
        self._taken = 0  #: chunks, and
        self._nbytes = 0  #: bytes not reported yet

    def feed(self, chunks: list[Chunk], *, closed: bool) -> None:
        self.closed = self.closed or closed
        if self.closed:
            self._sizes.clear()
        else:
            self._sizes.extend([size_of(chunk) for chunk in chunks])

    def take(self, payloads: int) -> None:
        if self.arrivals is not None:
            self.arrivals.took(payloads)
        if self.closed:
            return
        for _ in range(payloads):
            size = self._sizes.popleft()
            if self._unmeasured:
                self._unmeasured -= 1
            else:
                self._taken += 1
                self._nbytes += size
        if self._taken >= self._bound[0] or self._nbytes >= self._bound[1]:
            self._report(self._taken, self._nbytes)
            self._taken = self._nbytes = 0

    def settle(self) -> None:
        self._unmeasured = len(self._sizes)
        self._taken = self._nbytes = 0


class Inputs:
    """All inputs of one job: :meth:`ends` is what the engine reads, :meth:`feed` what the broker sends.

    Args:
        pipeline: Whose edges they are.
        inputs: What has come so far.
        transport: Finds the tensors.
        abroad: Brings those here that lie on other hosts.
        released: Called for each block that nobody looks at any longer.
        took: Told (edge, chunks, bytes) each time the job has taken a quarter of what may wait for it.
    """

    __slots__ = ("_abroad", "_meters", "_pipeline", "_released", "_streams", "_transport")

    def __init__(
        self,
        pipeline: Pipeline,
        inputs: list[EdgeInput],
        transport: Transport,
        abroad: Abroad,
        *,
        released: Callable[[BlockId], None],
        took: Callable[[int, int, int], None],
    ) -> None:
        self._pipeline = pipeline
        self._transport = transport
        self._abroad = abroad
        self._released = released
        limits = pipeline.limits
        bound = limits.ahead_chunks / 4, limits.ahead_mb * 2**20 / 4
        self._meters: dict[int, _Meter] = {}
        self._streams: dict[int, Stream] = {}
        for item in inputs:
            meter = self._meters[item.edge] = _Meter(bound, partial(took, item.edge))
            self._streams[item.edge] = Stream(taken=meter.take)
            self.feed(item)

    def ends(self) -> dict[str, AsyncIterator[Payload]]:
        """Producer's name -> its payloads. Once. Raises TransferError."""
        edges = self._pipeline.edges
        return {edges[n].from_: _through(edges[n], stream) for n, stream in self._streams.items()}

    def feed(self, item: EdgeInput) -> None:
        """More of one edge. A chunk that can't be read ends that edge with the error."""
        meter = self._meters[item.edge]
        if meter.failed:
            self._drop(item.chunks)
            return
        meter.feed(item.chunks, closed=item.closed)
        if meter.arrivals is None and any(map(self._abroad.foreign, item.chunks)):
            meter.arrivals = self._expect(item.edge)
        if meter.arrivals is not None:
            meter.arrivals.add(item.chunks, ended=item.closed)
        else:
            self._deliver(item.edge, item.chunks, item.closed)

    def _expect(self, edge: int) -> Arrivals:
        return Arrivals(
            self._pipeline.edges[edge],
            self._abroad,
            unread=self._streams[edge].unread,
            deliver=partial(self._deliver, edge),
            fail=partial(self._fail, edge),
            released=self._released,
        )

    def _deliver(self, edge: int, chunks: list[Chunk], closed: bool) -> bool:
        """To the job, in order. False: one can't be read, and that ends the edge."""
        payloads: list[Payload] = []
        for number, chunk in enumerate(chunks):
            try:
                payloads.append(unpack(chunk, self._transport, self._released))
            except AdapterError as error:
                self._drop(chunks[number + 1 :])  # unpack lets go of its own chunk's blocks
                self._streams[edge].feed(payloads, closed=True)
                self._fail(edge, error)
                return False
        self._streams[edge].feed(payloads, closed=closed)
        return True

    def _fail(self, edge: int, error: AdapterError) -> None:
        self._meters[edge].feed([], closed=True)
        self._meters[edge].failed = True
        let_go(error)  # what was unpacked beside it would stay as long as the error
        self._streams[edge].fail(error)

    def _drop(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            for block in blocks_of(chunk):
                self._released(block)

    def close(self) -> None:
        """The job has ended: what is still on its way to it goes back."""
        for meter in self._meters.values():
            if meter.arrivals is not None:
                meter.arrivals.close()
                meter.arrivals = None  # breaks a cycle, see _Meter

    def settle(self) -> None:
        """The broker was restarted: it takes all that has come so far for taken."""
        for meter in self._meters.values():
            meter.settle()


def _through(edge: Edge, stream: AsyncIterator[Payload]) -> AsyncIterator[Payload]:
    if edge.transfer is not None:
        stream = find_transfer(edge.transfer)(stream)
    if edge.window is not None:
        stream = windows(stream, edge.window)
    return stream
