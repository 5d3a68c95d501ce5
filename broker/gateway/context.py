"""What every handler needs, and the steps that all of them share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from adapters.chunk import Payload
from broker.client import Client, RequestStream
from broker.gateway.errors import ApiError, from_decoding
from broker.gateway.keys import ApiKeys
from broker.gateway.link import BrokerLink, gone
from broker.gateway.metrics import Metrics
from broker.gateway.models import Model
from broker.gateway.params import StageParams
from broker.gateway.plan import AnyPlan, encode, request_name
from broker.gateway.room import Room
from broker.gateway.settings import Settings
from broker.protocol import Timing

T = TypeVar("T")

ACCEPT_S = 5.0  #: the broker says yes or no at once; one that does not is being restarted, or drowns

SEEDS = 2**63


class Context(msgspec.Struct, frozen=True):
    """Shared by all handlers of one gateway process."""

    link: BrokerLink
    settings: Settings
    metrics: Metrics
    keys: ApiKeys
    room: Room

    async def submit(self, call: Call, plan: AnyPlan, number: int) -> RequestStream:
        """Submits the ``number``-th choice of a call. Raises ApiError and BrokerError."""
        client = await self.link.reach()
        try:
            async with asyncio.timeout(ACCEPT_S):
                return await self._submit(client, call, plan, number)
        except TimeoutError:
            raise gone() from None

    @staticmethod
    async def _submit(client: Client, call: Call, plan: AnyPlan, number: int) -> RequestStream:
        seed = None if call.seed is None else (call.seed + number) % SEEDS
        return await client.submit(
            call.model.name,
            outputs=call.outputs,
            given=call.given,
            params=call.params,
            has=call.has,
            seed=seed,
            priority=call.priority,
            deadline_s=call.deadline_s,
            tenant=plan.tenant,
            name=request_name(plan.id, number),
            stored=plan.stored,
            call=encode(plan),
            keep_s=call.keep_s,
        )


class Call(msgspec.Struct, kw_only=True):
    """A request to the broker, ready to be submitted (once for each choice)."""

    model: Model
    outputs: list[str]
    given: dict[str, list[Payload]]
    params: StageParams
    has: list[str] = []
    seed: int | None = None
    priority: int = 0
    deadline_s: float | None = None
    keep_s: float | None = None  #: see :meth:`broker.client.Client.submit`


@asynccontextmanager
async def coming(stall_s: float) -> AsyncIterator[None]:
    """Around the wait for the next piece of a body. Raises ApiError (408) where none comes in that time."""
    try:
        async with asyncio.timeout(stall_s):
            yield
    except TimeoutError:
        message = f"nothing more of the body came for {stall_s:g} s"
        raise ApiError(message, status=408, code="body_stalled") from None


async def parsed(request: web.Request, decoder: msgspec.json.Decoder[T], stall_s: float) -> T:
    """A request's body, decoded. aiohttp's own ``read`` would keep its bytes until the answer's end.

    Raises ApiError: 400 that names the field at fault, 408 for a caller that sends nothing for ``stall_s``;
    HTTPRequestEntityTooLarge for more than the application takes.
    """
    body, most = bytearray(), request.client_max_size
    while True:
        async with coming(stall_s):
            piece = await request.content.readany()
        if not piece:
            break
        body += piece
        if len(body) > most:
            raise web.HTTPRequestEntityTooLarge(most)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise from_decoding(error, kind=decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = from_decoding(error)
        if request.content_type.startswith(("multipart/", "application/x-www-form-urlencoded")):
            problem.message += f"; it came as {request.content_type}: send it as application/json"
        raise problem from None


async def together(*work: Any) -> None:
    """Runs coroutines at once; the first that fails ends the others and is raised."""
    if len(work) == 1:
        await work[0]
        return
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        # A task holds its error, that the frames it passed, and those the tensors they looked at: without
        # this cycle the tensors' memory goes back at once. (A TaskGroup would leave one of its own.)
        tasks.clear()


def stage_times(timings: list[Timing]) -> dict[str, dict[str, float]]:
    """The stages' timings of a request, in seconds since the broker accepted it; -1: never happened."""
    return {
        timing.stage: {
            "queued_s": timing.queued,
            "started_s": timing.started,
            "first_chunk_s": timing.first_chunk,
            "last_chunk_s": timing.last_chunk,
            "ended_s": timing.ended,
            "chunks": timing.chunks,
            "attempts": timing.attempts,
        }
        for timing in timings
    }


def stage_metrics(stream: RequestStream) -> dict[str, Any]:
    """The field `metrics` of a finished request's answer."""
    return {"stage_metrics": stage_times(stream.timings)}
