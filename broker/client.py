"""The broker's client: what the gateway, the command line and the Python API talk through.

async with Client() as client:
    async with await client.submit("voice", outputs=["text"], given={"request": [payload]}) as stream:
        async for output, payload in stream: ...
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from types import TracebackType
from typing import Any, Self

import msgspec

from adapters.arena import SharedMemory
from adapters.chunk import Chunk, Payload, pack_wait, unpack
from adapters.handle import AdapterError
from broker.address import endpoints
from broker.protocol import (
    VERSION,
    Abort,
    Accepted,
    Beat,
    Bye,
    Connect,
    Connected,
    Ended,
    Error,
    Free,
    Inspect,
    Output,
    Refused,
    Reject,
    Report,
    Submit,
    Timing,
    Who,
    decode_to_client,
    new_peer,
)
from broker.wire import Connection
from pipelines.graph import Pipeline

SILENCE_S = 6.0  #: without a beat of the broker for so long, it is taken for dead

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


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
    """

    def __init__(self, client: Client, tag: int) -> None:
        self.request = 0  #: the broker's number for it
        self.timings: list[Timing] = []
        self.tag = tag
        self.accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._client = client
        self._waiting: deque[tuple[str, Chunk]] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._ended = False
        self._error: BrokerError | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, Payload]:
        while not self._waiting:
            if self._ended:
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
        return output, self._client.unpack(chunk)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def abort(self) -> None:
        """Tells the broker that nobody waits any more. Idempotent; no await, so it works in any clean-up."""
        if not self._ended:
            self._client.forget(self.tag)
            self.end(BrokerError(Error("cancelled", "the request was aborted", 499)), [])
        while self._waiting:
            self._client.release(self._waiting.popleft()[1])

    def push(self, output: str, chunk: Chunk) -> None:
        """A chunk has come."""
        self._waiting.append((output, chunk))
        self._notify()

    def end(self, error: BrokerError | None, timings: list[Timing]) -> None:
        """Nothing more will come."""
        self._ended = True
        self._error = error
        self.timings = timings
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class Client:
    """One connection to the broker.

    Args:
        address: ``ipc:///folder``, ``tcp://host:port``, or None for the run folder.
        kind: "gateway", "api" or "cli"; for people who read ``omni-broker status``.
    """

    def __init__(self, address: str | None = None, *, kind: str = "api") -> None:
        self.pipelines: dict[str, Pipeline] = {}  #: what the broker serves, known after :meth:`connect`
        self._kind = kind
        self._endpoint = endpoints(address).clients
        self._tags = itertools.count(1)
        self._streams: dict[int, RequestStream] = {}
        self._reports: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._arena: SharedMemory | None = None
        self._run = ""
        self._beat_s = 1.0
        self._seen = 0.0
        self._connection: Connection
        self._connected: asyncio.Future[None]
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self, timeout_s: float = 5.0) -> None:
        """Raises :class:`BrokerGone` with the address and the cure when nothing answers."""
        self._connected = asyncio.get_running_loop().create_future()
        self._connection = Connection(self._endpoint, new_peer("c"), decode_to_client, self._on_message)
        self._connection.post(Connect(VERSION, self._kind))
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected
        except TimeoutError:
            self._connection.close(0)
            cure = "start one with `omni-broker start`, or name its address"
            raise BrokerGone(f"no broker answers at {self._endpoint}; {cure}") from None
        except BrokerError:
            self._connection.close(0)
            raise
        self._beating = asyncio.ensure_future(self._beat())

    @property
    def alive(self) -> bool:
        """Whether the broker has been heard lately."""
        return time.monotonic() - self._seen < SILENCE_S

    async def submit(
        self,
        pipeline: str,
        *,
        outputs: list[str],
        given: dict[str, list[Payload]],
        params: dict[str, dict[str, Any]] | None = None,
        has: list[str] | None = None,
        seed: int | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        tenant: str = "",
    ) -> RequestStream:
        """Submits and waits until the broker has accepted.

        Args:
            pipeline: One of :attr:`pipelines`.
            outputs: Names of the pipeline's outputs that are wanted.
            given: Producer ("request", or a stage that the caller stands in for) -> its whole output.
            params: Stage -> its parameters.
            has: Input modalities that the request carries, for stages with ``when``.
            seed: The same seed gives the same output; drawn by the broker if absent.
            priority: Lower runs first.
            deadline_s: The request fails when it takes longer.
            tenant: Whose share of the stages it counts against.

        Raises:
            BrokerError: The broker refuses; its ``error`` says why.
            AdapterError: A payload can't travel.
        """
        if not self.alive:
            raise BrokerGone(f"the broker at {self._endpoint} does not answer")
        tag = next(self._tags)
        chunks = {name: await self._pack(payloads) for name, payloads in given.items()}
        raw = {stage: msgspec.Raw(_encode(values)) for stage, values in (params or {}).items()}
        stream = self._streams[tag] = RequestStream(self, tag)
        self._connection.post(
            Submit(tag, pipeline, outputs, chunks, raw, has or [], seed, priority, deadline_s, tenant)
        )
        try:
            stream.request = await stream.accepted
        except BaseException:  # also when the waiter is cancelled
            stream.abort()
            raise
        return stream

    async def _pack(self, payloads: list[Payload]) -> list[Chunk]:
        assert self._arena is not None
        last = len(payloads) - 1
        return [await pack_wait(p, seq, self._arena, last=seq == last) for seq, p in enumerate(payloads)]

    async def inspect(self, what: str) -> dict[str, Any]:
        """The broker's report "status", "ready" or "metrics" (see :mod:`broker.core.report`)."""
        tag = next(self._tags)
        report: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._reports[tag] = report
        self._connection.post(Inspect(tag, what))
        try:
            async with asyncio.timeout(SILENCE_S):
                return await report
        except TimeoutError:
            raise BrokerGone(f"the broker at {self._endpoint} does not answer") from None
        finally:
            del self._reports[tag]

    async def close(self) -> None:
        """Aborts what is open and leaves."""
        if self._beating is None:
            return
        self._beating.cancel()
        self._beating = None
        for stream in list(self._streams.values()):
            stream.abort()
        self._connection.post(Bye())
        self._connection.close()
        if self._arena is not None:
            self._arena.close()

    # --- for the streams

    def unpack(self, chunk: Chunk) -> Payload:
        """A chunk's payload; raises BrokerError when it can't be read."""
        try:
            return unpack(chunk, self._arena, self._connection.released)
        except AdapterError as error:
            raise BrokerError(Error("bad_output", f"an output can't be read: {error}")) from error

    def release(self, chunk: Chunk) -> None:
        """A chunk that nobody will unpack."""
        for handle in chunk.handles:
            self._connection.released(handle.block)

    def forget(self, tag: int) -> None:
        """Takes a request out and tells the broker."""
        if self._streams.pop(tag, None) is not None:
            self._connection.post(Abort(tag))

    # --- what the broker says

    def _on_message(self, message: Any) -> None:
        self._seen = time.monotonic()
        kind = type(message)
        if kind is Output:
            stream = self._streams.get(message.tag)
            if stream is None:
                self.release(message.chunk)
            else:
                stream.push(message.output, message.chunk)
        elif kind is Accepted:
            stream = self._streams.get(message.tag)
            if stream is not None and not stream.accepted.done():
                stream.accepted.set_result(message.request)
        elif kind is Ended:
            stream = self._streams.pop(message.tag, None)
            if stream is not None:
                stream.end(BrokerError(message.error) if message.error else None, message.timings)
        elif kind is Refused:
            self._refuse(message.tag, BrokerError(message.error))
        elif kind is Free:
            for block in message.blocks if self._arena is not None else ():
                self._arena.free(block)  # type: ignore[union-attr]
        elif kind is Report:
            report = self._reports.get(message.tag)
            if report is not None and not report.done():
                report.set_result(_decode(message.body))
        elif kind is Connected:
            self._on_connected(message)
        elif kind is Reject:
            if not self._connected.done():
                self._connected.set_exception(BrokerError(Error("rejected", message.reason, 503)))
        elif kind is Who:
            self._lose_all("the broker was restarted")
            self._run = ""  # whatever run this is, it gets a new arena: the old one may be another run's
            self._connection.post(Connect(VERSION, self._kind))

    def _refuse(self, tag: int, error: BrokerError) -> None:
        stream = self._streams.pop(tag, None)
        if stream is not None:
            stream.end(error, [])
            if not stream.accepted.done():
                stream.accepted.set_exception(error)

    def _on_connected(self, message: Connected) -> None:
        self.pipelines = {pipeline.name: pipeline for pipeline in message.pipelines}
        self._beat_s = message.beat_s
        if self._run != message.run:
            if self._arena is not None:
                self._arena.close()
            self._run, self._arena = message.run, SharedMemory(message.run)
            self._connection.post(Connect(VERSION, self._kind, self._arena.prefix))
        if not self._connected.done():
            self._connected.set_result(None)

    def _lose_all(self, why: str) -> None:
        for tag in list(self._streams):
            self._refuse(tag, BrokerGone(why))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            self._connection.post(Beat())
            if not self.alive and self._streams:
                self._lose_all(f"the broker at {self._endpoint} does not answer")
