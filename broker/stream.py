"""One request as its caller sees it: outputs in order, its end, and what its client must remember of it.

The client outlives the broker: a stream goes on when the broker comes back, without a gap and without a
repeat, since outputs are numbered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Self

from adapters.chunk import Chunk, Payload
from adapters.handle import size_of
from broker.protocol import Abort, Attach, Error, Forget, Submit, Taken, Timing
from pipelines.graph import Limits

if TYPE_CHECKING:
    from broker.client import Client


class BrokerError(Exception):
    """A request that was refused or that failed; carries the wire's :class:`Error`."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.message)
        self.error = error


class BrokerGone(BrokerError):
    """No broker answers at the address, or it went away."""

    def __init__(self, message: str) -> None:
        super().__init__(Error("broker_gone", message, 503, retry_after_s=1.0))


class RequestStream:
    """The events of one request, in order. Leaving the ``async with`` early aborts the request.

    Iterating yields ``(output, payload)`` pairs; tensors are read-only views that free themselves. At the
    end :attr:`timings` is set; a request that failed raises :class:`BrokerError` from the iteration.

    Whoever has a stream ends it in one of three ways: :meth:`done`, :meth:`abort` or :meth:`leave`.
    """

    def __init__(self, client: Client, opening: Submit | Attach, limits: Limits) -> None:
        self.name = opening.name  #: whoever knows it can attach to the request
        self.tag = opening.tag
        self.request = 0  #: the broker's number for it
        self.pipeline = ""
        self.outputs: list[str] = []
        self.call = b""  #: the notes that came with the submission
        self.timings: list[Timing] = []
        self.ended = False  #: nothing more comes from the broker
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._limits = limits
        self._client = client
        self._opening = opening
        self._received = dict(opening.received)  #: output -> chunks that have come
        self._waiting: deque[tuple[str, Chunk]] = deque()
        self._unmeasured = 0  #: of those that wait, how many the broker takes for taken
        self._taken: dict[str, tuple[int, int]] = {}  #: output -> (chunks, bytes) not told to the broker yet
        self._wake: asyncio.Future[None] | None = None
        self._error: BrokerError | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, Payload]:
        while not self._waiting:
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
        output, chunk = self._waiting.popleft()
        self._measure(output, chunk)
        return output, self._client.unpack(chunk)

    def _measure(self, output: str, chunk: Chunk) -> None:
        """Tells the broker each time the reader has taken a quarter of what may wait for it."""
        if self._unmeasured:
            self._unmeasured -= 1
            return
        if self.ended:
            return
        chunks, nbytes = self._taken.get(output, (0, 0))
        chunks, nbytes = chunks + 1, nbytes + size_of(chunk)
        if chunks * 4 >= self._limits.ahead_chunks or nbytes * 4 >= self._limits.ahead_mb * 2**20:
            self._client.post(Taken(self.tag, output, chunks, nbytes))
            chunks = nbytes = 0
        self._taken[output] = (chunks, nbytes)

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
        while self._waiting:
            self._client.release(self._waiting.popleft()[1])

    # --- for the client

    def push(self, output: str, chunk: Chunk) -> bool:
        """A chunk has come. False: it had come before."""
        if chunk.seq < self._received.get(output, 0):
            return False
        self._received[output] = chunk.seq + 1
        self._waiting.append((output, chunk))
        self._notify()
        return True

    def end(self, error: BrokerError | None, timings: list[Timing]) -> None:
        """Nothing more will come."""
        self.ended = True
        self._error = error
        self.timings = timings
        self._notify()

    def attached(self, pipeline: str, outputs: list[str], call: bytes, limits: Limits) -> None:
        """What the broker knows of a request that was submitted earlier."""
        self.pipeline, self.outputs, self.call, self._limits = pipeline, outputs, call, limits

    def reopen(self) -> Submit | Attach:
        """The message that continues it at a broker that was restarted, which takes all for taken.

        What has ended is kept there for us until we have read it, but is not to begin anew.
        """
        if self.ended:
            return Attach(self.tag, self.name, dict(self._received))
        self._unmeasured = len(self._waiting)
        self._taken.clear()
        self._opening.received = dict(self._received)
        return self._opening

    @property
    def holds(self) -> bool:
        """Whether chunks with blocks wait for the reader."""
        return any(chunk.handles for _, chunk in self._waiting)

    def reattach(self) -> Submit | Attach | None:
        """The message that continues it at a broker that had given us up; None: nothing can.

        Blocks that we have not looked at belong to others by now: they must come again, also after the end.
        The same goes for what we lent, so nothing that was given in blocks can be submitted again.
        """
        self.ended = False
        for output, chunk in reversed(self._waiting):
            self._received[output] = chunk.seq
        self._waiting.clear()
        if type(self._opening) is Submit and self.opened.done():
            self._opening = Attach(self.tag, self.name)
        return None if self._lends() else self.reopen()

    def resubmit(self) -> Submit | Attach | None:
        """The message that begins it at a broker that knows nothing; None: it has to end."""
        begun = any(self._received.values()) or type(self._opening) is Attach
        return None if begun or self._lends() else self.reopen()

    def _lends(self) -> bool:
        opening = self._opening
        return type(opening) is Submit and any(c.handles for given in opening.given.values() for c in given)

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
