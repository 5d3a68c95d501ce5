"""The broker's client: what the gateway, the command line and the Python API talk through.

async with Client() as client:
    async with await client.submit("voice", outputs=["text"], given={"request": [payload]}) as stream:
        async for output, payload in stream: ...
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from adapters.chunk import Chunk, Payload
from adapters.handle import AdapterError, BlockId, blocks_of
from broker.address import AddressError, cure, endpoints
from broker.lending import Lending, unread
from broker.open_requests import OpenRequests
from broker.protocol import (
    Abort,
    Attach,
    Beat,
    Busy,
    Bye,
    Connected,
    Error,
    Forget,
    Free,
    Hosts,
    Inspect,
    Letters,
    Message,
    Output,
    Reject,
    Report,
    Submit,
    Who,
    decode_to_client,
    new_peer,
)
from broker.questions import Question, Questions
from broker.serving import data_address
from broker.session import Session
from broker.stream import BrokerError, BrokerGone, RequestStream
from broker.wire import Connection
from pipelines.graph import Limits, Pipeline

__all__ = ["BrokerError", "BrokerGone", "Client", "RequestStream"]

SILENCE_S = 6.0  #: without a beat of the broker for so long, it is taken for dead
PATIENCE_S = 30.0  #: and for so long, open requests wait for it to come back

_encode = msgspec.msgpack.Encoder().encode


class Client:
    """One connection to the broker. Requests go on when the broker dies and comes back in time.

    Args:
        address: ``ipc:///folder``, ``tcp://host:port``, or None for the run folder.
        kind: "gateway", "api" or "cli"; for people who read ``omni-broker status``.
        patience_s: How long open requests wait for a silent broker before they fail.
        data_host: Where other hosts read tensors that are lent here, see :func:`broker.serving.data_address`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        kind: str = "api",
        patience_s: float = PATIENCE_S,
        data_host: str | None = None,
    ) -> None:
        self.pipelines: dict[str, Pipeline] = {}  #: what the broker serves, known after :meth:`connect`
        self.busy: dict[str, float] = {}  #: pipeline that takes nothing now -> seconds until another try
        self._patience_s = patience_s
        self._endpoint = endpoints(address).clients
        self._where = address or self._endpoint  #: for people, who know the workers' port and not the next
        self._tags = itertools.count(1)
        self._streams = OpenRequests(self._limits)
        self._questions = Questions()
        self._lending = Lending(kind, data_address(self._endpoint, data_host))
        self._session: Session
        self._introducing: Literal["", "introduce", "gone"] = ""
        self._beat_s = 1.0
        self._silent_s = math.inf  #: counted in beats, so that a process that was stopped blames nobody
        self._connection: Connection
        self._connected: asyncio.Future[None]
        self._beating: asyncio.Task[None] | None = None
        self._handlers: dict[type[Message], Any] = {
            **self._streams.handlers,
            Output: self._on_output,
            Free: self._on_free,
            Report: self._questions.answer,
            Busy: self._on_busy,
            Connected: self._on_connected,
            Reject: self._on_reject,
            Who: self._on_who,
            Hosts: self._lending.learn,
        }

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
        self._session, self._introducing = Session(), ""
        self._connection = Connection(
            self._endpoint,
            new_peer("c"),
            decode_to_client,
            self._on_message,
            self._session.released,
            on_broken=self._on_broken,
        )
        self._connection.post(self._lending.connect())
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected
        except TimeoutError:
            self._connection.close(0)
            raise BrokerGone(f"no broker answers at {self._where}; {cure(self._endpoint)}") from None
        except BrokerError:
            self._connection.close(0)
            raise
        self._beating = asyncio.ensure_future(self._beat())

    @property
    def alive(self) -> bool:
        """Whether the broker has been heard lately."""
        return self._silent_s < SILENCE_S

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
        name: str | None = None,
        stored: bool = False,
        call: bytes = b"",
        keep_s: float | None = None,
    ) -> RequestStream:
        """Submits and waits until the broker has accepted.

        Args:
            pipeline: One of :attr:`pipelines`.
            outputs: Names of the pipeline's outputs that are wanted.
            given: Producer ("request", or a stage that the caller stands in for) -> its whole output.
            params: Stage -> its parameters.
            has: Input modalities that the request carries, for stages with ``when``.
            seed: The same seed gives the same output; drawn if absent.
            priority: Lower runs first.
            deadline_s: The request fails when it takes longer.
            tenant: Whose share of the stages it counts against.
            name: The request's name for ever (:data:`broker.protocol.NAME`); drawn if absent. One that the
                broker knows continues that request.
            stored: The request goes on without its caller, and is kept for a while after its end.
            call: The caller's own notes, given to whoever attaches.
            keep_s: For how long a stored request is kept after its end; None: as long as all others.

        Raises:
            BrokerError: The broker refuses; its ``error`` says why.
            AdapterError: A payload can't travel.
            ValueError: The seed has more than 64 bits.
        """
        self._check_alive()
        if seed is not None and not -(1 << 63) <= seed < 1 << 64:
            raise ValueError(f"seed: {seed} has more than 64 bits")
        tag = next(self._tags)
        name = name or secrets.token_hex(12)
        if seed is None:  # here, so that a submission that has to be repeated asks for the same again
            seed = secrets.randbits(63)
        chunks = await self._lending.pack(given, name, self.pipelines.get(pipeline))
        raw = {stage: msgspec.Raw(_encode(values)) for stage, values in (params or {}).items()}
        message = Submit(
            tag, pipeline, outputs, chunks, raw, has or [], seed, priority, deadline_s, tenant,
            name, {}, stored, call, keep_s,
        )  # fmt: skip
        if self._lending.untold:
            self._tell_arena()
        for chunk in itertools.chain.from_iterable(chunks.values()):
            self._session.lend(chunk.handles)
        stream = RequestStream(self, message, self._limits(pipeline))
        stream.pipeline, stream.outputs, stream.call = pipeline, outputs, call
        return await self._open(stream, message)

    async def attach(self, name: str, received: dict[str, int] | None = None) -> RequestStream:
        """Continues a request that was submitted earlier, perhaps by another client, which loses it.

        Args:
            name: The request's.
            received: Output -> chunks of it that the caller has already.

        Raises:
            BrokerError: The broker refuses; with status 404 it knows no request of this name.
        """
        self._check_alive()
        message = Attach(next(self._tags), name, received or {})
        return await self._open(RequestStream(self, message, Limits()), message)

    def _check_alive(self) -> None:
        if not self.alive:
            raise BrokerGone(f"the broker at {self._where} does not answer")

    async def _open(self, stream: RequestStream, message: Submit | Attach) -> RequestStream:
        self._streams[stream.tag] = stream
        self._post_unless_introducing(message)
        try:
            await stream.opened
        except BaseException:  # also when the waiter is cancelled
            stream.abort()
            raise
        return stream

    def _limits(self, pipeline: str) -> Limits:
        known = self.pipelines.get(pipeline)
        return known.limits if known is not None else Limits()

    async def inspect(self, what: str, name: str = "") -> dict[str, Any]:
        """The broker's report "status", "ready", "metrics", "request" of a name, or "stored" of a tenant.

        See :mod:`broker.core.report`.
        """
        return await self._ask(Inspect(next(self._tags), what, name))

    async def letters(self, act: Literal["list", "show", "retry", "drop"], name: str = "") -> dict[str, Any]:
        """The dead letters: requests that failed although they should not have. ``name``: one of them."""
        return await self._ask(Letters(next(self._tags), act, name))

    async def _ask(self, question: Question) -> dict[str, Any]:
        try:
            return await self._questions.ask(question, self._post_unless_introducing, SILENCE_S)
        except TimeoutError:
            raise BrokerGone(f"the broker at {self._where} does not answer") from None

    def _post_unless_introducing(self, message: Message) -> None:
        """What goes out anyway when the broker has answered our introduction must not go out twice."""
        if not self._introducing:
            self._connection.post(message)

    async def close(self) -> None:
        """Leaves; requests that are open end, but for those that were submitted with ``stored``.

        What they were given stays readable until the broker, or whoever sweeps, removes it.
        """
        if self._beating is None:
            return
        self._beating.cancel()
        self._beating = None
        for stream in list(self._streams.values()):
            stream.leave()
        self._lending.leave()
        self._connection.post(Bye())  # the broker sweeps when it has read this: our locks must be gone
        self._connection.close()

    # --- for the streams

    async def land(self, chunk: Chunk) -> tuple[Chunk, list[BlockId]]:
        """See :meth:`broker.lending.Lending.land`; raises BrokerError when the tensors are out of reach."""
        try:
            return await self._lending.land(chunk)
        except (AdapterError, AddressError) as error:
            raise BrokerError(unread(error)) from error

    def unpack(self, chunk: Chunk) -> Payload:
        """A chunk's payload; raises BrokerError when it can't be read."""
        try:
            return self._lending.unpack(chunk, self._connection.released)
        except AdapterError as error:
            raise BrokerError(unread(error)) from error

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Nobody here looks at these any longer."""
        for block in blocks:
            self._connection.released(block)

    def post(self, message: Message) -> None:
        """Something about a request for the broker."""
        self._connection.post(message)

    def forget(self, tag: int, farewell: Abort | Forget) -> None:
        """Takes a request out and tells the broker."""
        if self._streams.pop(tag, None) is not None:
            self._connection.post(farewell)

    # --- what the broker says

    def _on_message(self, message: Any) -> None:
        self._silent_s = 0.0
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)

    def _on_output(self, message: Output) -> None:
        chunk = message.chunk
        if chunk.handles:
            self._session.received(chunk.handles)
        if not self._streams.push(message):
            self.release(blocks_of(chunk))

    def _on_broken(self) -> None:
        """What was under way on the connection is lost: what is open is asked for again, from where it is.

        A broker that noticed has given us up, and says so.
        """
        if self._introducing or not self._lending.run:
            return
        for stream in self._streams.values():
            if not stream.ended:
                self._connection.post(stream.reopen())
        for question in self._questions.open():
            self._connection.post(question)

    def _on_free(self, message: Free) -> None:
        self._session.freed(message.blocks)
        self._lending.free(message.blocks)

    def _on_busy(self, message: Busy) -> None:
        if message.retry_after_s > 0:
            self.busy[message.pipeline] = message.retry_after_s
        else:
            self.busy.pop(message.pipeline, None)

    def _on_reject(self, message: Reject) -> None:
        self._give_up(BrokerError(Error("rejected", message.reason, 503)))

    def _give_up(self, error: BrokerError) -> None:
        if not self._connected.done():
            self._connected.set_exception(error)
        self._streams.fail_all(error)

    # --- a broker that comes back

    def _on_who(self, message: Who) -> None:
        """Reports to a broker that was restarted; what is open goes on when it has answered."""
        act = self._session.introduce(message)
        if act == "ignore":
            return
        if self._introducing != "gone":
            self._introducing = act
        self.busy.clear()
        met = self._session.boot if self._introducing == "introduce" and self._lending.run else 0
        self._connection.restart([self._lending.connect(met=met)])  # our arena may be another run's

    def _on_connected(self, message: Connected) -> None:
        if self._introducing or not self._session.boot:
            self._session.met(message.boot)  # else it answers what was for a broker before it, and will ask
        self.pipelines = {pipeline.name: pipeline for pipeline in message.pipelines}
        self._beat_s = message.beat_s
        act, self._introducing = self._introducing, ""
        lost = self._lending.run not in ("", message.run)
        if lost or act == "gone" or not self._lending.run:
            self._session.begin_anew()
            try:
                self._lending.begin(message)
            except (AdapterError, AddressError) as error:
                self._give_up(BrokerError(Error("no_data_server", str(error), 503)))
                return
            self._tell_arena()
        if act:
            self._reopen(act, lost=lost)
        if not self._connected.done():
            self._connected.set_result(None)

    def _tell_arena(self) -> None:
        self._connection.post(self._lending.connect(arena=True, met=self._session.boot))

    def _reopen(self, act: Literal["introduce", "gone"], *, lost: bool) -> None:
        known = act == "introduce" and not lost
        if known:
            self._tell_arena()
        for tag, stream in list(self._streams.items()):
            if stream.ended and not known and (lost or not stream.holds):
                continue
            opening = stream.reopen() if known else stream.resubmit() if lost else stream.reattach()
            if opening is None:
                self._streams.fail(
                    tag, BrokerGone("the broker was restarted, and does not know this request")
                )
            else:
                self._connection.post(opening)
        if known:
            self._connection.post(self._session.resync())
        for question in self._questions.open():
            self._connection.post(question)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            self._silent_s += self._beat_s
            self._connection.post(Beat())
            self._lending.look()
            if self._silent_s > self._patience_s:
                for tag, stream in self._streams.items():
                    if not stream.ended:  # a broker that only stood still would wait for us for ever
                        self._connection.post(Abort(tag, leave=True))
                self._streams.fail_all(BrokerGone(f"the broker at {self._where} does not answer"))
