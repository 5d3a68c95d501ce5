"""The answer of the endpoints for pictures: one JSON body, or an event for each picture, whole or partial."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from adapters.chunk import Payload
from broker.client import RequestStream
from broker.gateway import prints
from broker.gateway.context import SEEDS, together
from broker.gateway.errors import ApiError
from broker.gateway.metrics import Watch
from broker.gateway.plan import ImagesPlan
from broker.gateway.prints import Print
from broker.gateway.sse import Events, Reader
from broker.gateway.usage import picture_usage, seen_tokens

_encode = msgspec.json.Encoder().encode


async def respond(
    reader: Reader, plan: ImagesPlan, streams: list[RequestStream], watch: Watch
) -> web.StreamResponse:
    """Sends each picture as it comes. An error before the first is raised, a later one is sent."""
    events = Events(reader)
    if plan.stored:
        await events.begin()  # the headers tell the id, by which the answer can be fetched from now on
    async with events.whole(plan.id):
        await together(*(_send(events, plan, number, s, watch) for number, s in enumerate(streams)))
        watch.done()
    return events.response


async def _send(events: Events, plan: ImagesPlan, number: int, stream: RequestStream, watch: Watch) -> None:
    """One picture's events; ``index`` says which picture it is, each completed one has its own usage."""
    finished = False
    async for _, payload in stream:
        partial: int | None = payload.get("partial")
        picture = await _print(plan, payload, watch)
        del payload  # its memory goes back before we wait for the client
        event: dict[str, Any] = {
            "type": f"{plan.events}.{'completed' if partial is None else 'partial_image'}",
            "b64_json": picture.data,
            "created_at": plan.created,
            "index": number,
            **_looks(plan, picture),
        }
        if partial is None:
            # What was asked counts with the first picture alone: the sum is that of the whole answer.
            text, seen = (plan.text_tokens, plan.image_tokens) if number == 0 else (0, 0)
            event["usage"] = picture_usage(text, seen, seen_tokens(picture.width, picture.height))
            event["seed"] = _seed(plan, number)
            finished = True
        else:
            event["partial_image_index"] = partial
        await events.send(_encode(event), number)
    if not finished:
        raise _none()


async def whole(plan: ImagesPlan, streams: list[RequestStream], watch: Watch) -> web.Response:
    """All pictures in one body, when they are complete."""
    found: list[Print] = [None] * len(streams)  # type: ignore[list-item]

    async def collect(number: int) -> None:
        found[number] = await _last(plan, streams[number], watch)

    await together(*(collect(number) for number in range(len(streams))))
    watch.done()
    drawn = sum(seen_tokens(picture.width, picture.height) for picture in found)
    body = {
        "created": plan.created,
        **_looks(plan, found[0]),
        "data": [
            {"b64_json": picture.data, "seed": _seed(plan, number)} for number, picture in enumerate(found)
        ],
        "usage": picture_usage(plan.text_tokens, plan.image_tokens, drawn),
    }
    return web.Response(body=_encode(body), content_type="application/json")


async def _last(plan: ImagesPlan, stream: RequestStream, watch: Watch) -> Print:
    """The finished picture of a request, which may have partial ones too."""
    picture: Print | None = None
    async for _, payload in stream:
        if payload.get("partial") is None:
            picture = await _print(plan, payload, watch)
    if picture is None:
        raise _none()
    return picture


async def _print(plan: ImagesPlan, payload: Payload, watch: Watch) -> Print:
    watch.first_image()
    return await prints.picture(payload, plan.format, plan.quality)


def _looks(plan: ImagesPlan, picture: Print) -> dict[str, str]:
    return {
        "size": picture.size,
        "output_format": plan.format,
        "quality": "auto",
        "background": "opaque",
    }


def _seed(plan: ImagesPlan, number: int) -> int:
    return (plan.seed + number) % SEEDS


def _none() -> ApiError:
    return ApiError("the pipeline gave no picture", status=500, code="bad_output")
