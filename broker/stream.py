"""One request as its caller sees it: outputs in order, its end, and what its client must remember of it.

The client outlives the broker: a stream goes on when the broker comes back, without a gap and without a
repeat, since outputs are numbered.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Self

from adapters.chunk import Chunk, Payload
from adapters.handle import BlockId, blocks_of
from broker.protocol import Abort, Attach, Error, Forget, Submit, Timing
from broker.receiving import Receiving
from pipelines.graph import Limits

if TYPE_CHECKING:
    from broker.client import Client


NOTHING: list[BlockId] = []


class BrokerError(Exception):
    """A request that was refused or that failed; carries the wire's :class:`Error`."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.message)
        self.error = error


class BrokerGone(BrokerError):
    """No broker answers at the address, or it went away."""

    def __init__(self, message: str) -> None:
        super().__init__(Error("broker_gone", message, 503, retry_after_s=1.0))


class RequestStream(Receiving):
    """The events of one request, in order. Leaving the ``async with`` early aborts the request.

    Iterating yields ``(output, payload)`` pairs; tensors are read-only views that free themselves. At the
    end :attr:`timings` is set; a request that failed raises :class:`BrokerError` from the iteration.

    Whoever has a stream ends it in one of three ways: :meth:`done`, :meth:`abort` or :meth:`leave`.
    """

    def __init__(self, client: Client, opening: Submit | Attach, limits: Limits) -> None:
        super().__init__(opening, limits)
        self.name = opening.name  #: whoever knows it can attach to the request
        self.tag = opening.tag
        self.request = 0  #: the broker's number for it
        self.pipeline = ""
        self.outputs: list[str] = []
        self.call = b""  #: the notes that came with the submission
        self.timings: list[Timing] = []
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client = client
        self._wake: asyncio.Future[None] | None = None
        self._error: BrokerError | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, Payload]:
        while True:
            if not self.waiting:
                await self._until_one_waits()
            first = self.waiting[0]
            chunk, gone = first[1], NOTHING
            if chunk.handles:  # they may lie on another host
                chunk, gone = await self._client.land(chunk)
            if self.waiting and self.waiting[0] is first:  # else it was dropped while it was on its way
                break
        output, _, taken = self.take()
        if gone:
            self._client.release(gone)
        if taken is not None:
            self._client.post(taken)
        return output, self._client.unpack(chunk)

    async def _until_one_waits(self) -> None:
        while not self.waiting:
            if self.ended:
                if self._error is not None:
                    error, self._error = self._error, None
                    try:
                        raise error
                    finally:
                        # Its traceback holds the reader's frames, and those the last payload's memory: no
                        # cycle may keep them.
                        del error
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    # --- its end

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.done()
        else:
            self.abort()

    def done(self) -> None:
        """The caller has everything: the broker may forget the request. What has not ended is aborted."""
        self._close(Forget(self.tag) if self.ended else Abort(self.tag))

    def abort(self) -> None:
        """The caller wants no more, not even a stored request's answer later.

        Idempotent, like the other two; no await, so it works in any clean-up.
        """
        self._close(Abort(self.tag))

    def leave(self) -> None:
        """The caller goes and may come back, with :meth:`broker.client.Client.attach`.

        A request that was submitted with ``stored`` goes on, and is kept for a while; any other ends.
        """
        self._close(Abort(self.tag, leave=True))

    def _close(self, farewell: Abort | Forget) -> None:
        self._client.forget(self.tag, farewell)
        if not self.ended:
            self.end(BrokerError(Error("cancelled", "the request was aborted", 499)), [])
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        while self.waiting:
            self._client.release(blocks_of(self.waiting.popleft()[1]))

    # --- for the client

    def push(self, output: str, chunk: Chunk) -> bool:
        """A chunk has come. False: it had come before."""
        new = super().push(output, chunk)
        if new:
            self._notify()
        return new

    def accept(self, request: int) -> None:
        """The broker knows it, under this number."""
        self.request, self.accepted = request, True
        if not self.opened.done():
            self.opened.set_result(None)

    def end(self, error: BrokerError | None, timings: list[Timing]) -> None:
        """Nothing more will come."""
        self.ended = True
        self._error = error
        self.timings = timings
        self._notify()

    def attached(self, pipeline: str, outputs: list[str], call: bytes, limits: Limits) -> None:
        """What the broker knows of a request that was submitted earlier."""
        self.pipeline, self.outputs, self.call, self.limits = pipeline, outputs, call, limits

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
