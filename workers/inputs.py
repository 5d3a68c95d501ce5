"""The way of chunks into an engine: unpacked, through the edge's transfer adapter, cut into windows."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable
from functools import cache

from adapters.chunk import Payload, unpack
from adapters.handle import AdapterError, BlockId, Transport
from adapters.window import windows
from broker.protocol import EdgeInput
from pipelines.graph import Edge, Pipeline
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


class Inputs:
    """All inputs of one job: :attr:`ends` is what the engine reads, :meth:`feed` what the broker sends."""

    __slots__ = ("_released", "_streams", "_transport", "ends")

    def __init__(
        self,
        pipeline: Pipeline,
        inputs: list[EdgeInput],
        transport: Transport,
        released: Callable[[BlockId], None],
    ) -> None:
        self._transport = transport
        self._released = released
        self._streams: dict[int, Stream] = {}
        self.ends: dict[str, AsyncIterator[Payload]] = {}
        for item in inputs:
            edge = pipeline.edges[item.edge]
            stream = self._streams[item.edge] = Stream()
            self.ends[edge.from_] = self._through(edge, stream)
            self.feed(item)

    @staticmethod
    def _through(edge: Edge, stream: AsyncIterator[Payload]) -> AsyncIterator[Payload]:
        if edge.transfer is not None:
            stream = find_transfer(edge.transfer)(stream)
        if edge.window is not None:
            stream = windows(stream, edge.window)
        return stream

    def feed(self, item: EdgeInput) -> None:
        """More of one edge. A chunk that can't be read ends that edge with the error."""
        stream = self._streams[item.edge]
        payloads: list[Payload] = []
        for number, chunk in enumerate(item.chunks):
            try:
                payloads.append(unpack(chunk, self._transport, self._released))
            except AdapterError as error:
                for unread in item.chunks[number + 1 :]:  # unpack lets go of its own chunk's blocks
                    for handle in unread.handles:
                        self._released(handle.block)
                stream.feed(payloads, closed=True)
                stream.fail(error)
                return
        stream.feed(payloads, closed=item.closed)
