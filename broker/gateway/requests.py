"""/v1/requests/{id}: how a call stands, the rest of its answer for a caller that comes back, and its end.

Whichever gateway served the beginning may be gone. The broker keeps each request's outputs until its caller
has everything, so the answer is made again from its beginning, and what the reader has is left out.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from aiohttp import web

from broker.client import BrokerError, RequestStream
from broker.gateway import plan as plans
from broker.gateway.answering import attended, reader_of, stream_to, whole
from broker.gateway.context import Context, stage_times
from broker.gateway.errors import ApiError, from_broker
from broker.gateway.metrics import Unwatched
from broker.gateway.places import Place
from broker.gateway.plan import AnyPlan
from broker.protocol import Error, Timing

_ID = re.compile(r"[0-9a-f]{24}")

#: A call stands as the first of these that one of its requests is in; "done" takes all of them.
_STATES = ("failed", "cancelled", "running", "queued")

Report = dict[str, Any]


class Requests:
    """The handlers."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def status(self, request: web.Request) -> web.Response:
        """How the call stands, each of its choices."""
        plan, reports = await self.find(request, request.match_info["id"])
        states = [report["state"] for report in reports]
        body = {
            "id": plan.id,
            "object": "request",
            "kind": plan.__struct_config__.tag,
            "model": plan.model,
            "created": plan.created,
            "stored": plan.stored,
            "status": _overall(states),
            "choices": [_choice(index, report) for index, report in enumerate(reports)],
        }
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """The answer's stream, after the place that the reader names: `after` or `Last-Event-ID`.

        A browser whose stream broke asks for the same address again, and says in the header how far it has
        come since.
        """
        plan, reports = await self.find(request, request.match_info["id"])
        named = request.query.get("after", ""), request.headers.get("Last-Event-ID", "")
        place = Place.latest([Place.parse(text, plan.lanes) for text in named])
        reader = reader_of(self._context, request, place, stored=True)
        streams: list[RequestStream] = []
        with attended(streams, stored=plan.stored):
            await self.attach(plan, reports, streams)
            return await stream_to(reader, plan, streams, Unwatched())

    async def result(self, request: web.Request) -> web.StreamResponse:
        """The answer in one piece, when it is complete."""
        plan, reports = await self.find(request, request.match_info["id"])
        streams: list[RequestStream] = []
        with attended(streams, stored=plan.stored):
            await self.attach(plan, reports, streams)
            return await whole(plan, streams, Unwatched())

    async def cancel(self, request: web.Request) -> web.Response:
        """Ends the call, and forgets what there is of its answer."""
        plan, _ = await self.find(request, request.match_info["id"])
        await self.end(plan)
        return web.json_response({"id": plan.id, "object": "request", "deleted": True})

    async def end(self, plan: AnyPlan) -> None:
        """Ends a call, and forgets what there is of its answer."""
        client = await self._context.link.reach()
        for name in plan.names():
            try:
                (await client.attach(name)).abort()
            except BrokerError as error:
                if error.error.status != 404:  # it has ended meanwhile: all the better
                    raise

    async def find(self, request: web.Request, call: str) -> tuple[AnyPlan, list[Report]]:
        """A call's plan, and the broker's reports of its requests.

        Raises ApiError (404) in the same words for a call that never was, that is forgotten, and that is
        somebody else's.
        """
        client = await self._context.link.reach()
        first = await client.inspect("request", plans.request_name(call, 0)) if _ID.fullmatch(call) else {}
        try:
            plan = plans.decode(first.get("call", b""))
        except msgspec.DecodeError:
            raise unknown(call) from None
        if plan.tenant != request["tenant"]:
            raise unknown(call)
        others = [client.inspect("request", name) for name in plan.names()[1:]]
        reports = [first, *await asyncio.gather(*others)]
        if any("error_status" in report for report in reports):
            raise unknown(call)
        request["id"] = plan.id  # the response is the call's
        return plan, reports

    async def attach(self, plan: AnyPlan, reports: list[Report], streams: list[RequestStream]) -> None:
        """Takes the call's requests over, from whoever has them. Raises ApiError."""
        for report in reports:
            if report["error"] is not None:
                raise from_broker(Error(**report["error"]))
        client = await self._context.link.reach()
        for name in plan.names():
            try:
                streams.append(await client.attach(name))
            except BrokerError as error:
                raise unknown(plan.id) if error.error.status == 404 else error from None


def unknown(call: str) -> ApiError:
    """In the same words for a call that never was, that is forgotten, and that is somebody else's."""
    return ApiError(
        f"there is no request {call[:80]!r}, or it is not kept any more", status=404, code="request_not_found"
    )


def _overall(states: list[str]) -> str:
    return next((state for state in _STATES if state in states), "done")


def _choice(index: int, report: Report) -> dict[str, Any]:
    error = report["error"]
    return {
        "index": index,
        "status": report["state"],
        "age_s": report["age_s"],
        "outputs": report["outputs"],
        "stages": stage_times(msgspec.convert(report["stages"], list[Timing])),
        "error": error and {"message": error["message"], "code": error["type"], "stage": error["stage"]},
    }
