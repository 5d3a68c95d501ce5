"""From a checked call to its answer: requests at the broker, and whoever makes bytes of what comes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from broker.client import RequestStream
from broker.gateway import chat_stream, chat_whole, images_answer, speech_answer, transcript, video_answer
from broker.gateway.context import Call, Context
from broker.gateway.metrics import Watch
from broker.gateway.places import Place
from broker.gateway.plan import AnyPlan, ChatPlan, ImagesPlan, SpeechPlan, VideoPlan
from broker.gateway.sse import Reader


async def answer(context: Context, request: web.Request, call: Call, plan: AnyPlan) -> web.StreamResponse:
    """Submits the call's requests and answers it in the form that its caller asked for."""
    watch = context.metrics.watch(plan.model, request["started"])
    streams: list[RequestStream] = []
    with attended(streams, stored=plan.stored):
        for number in range(plan.choices):
            streams.append(await context.submit(call, plan, number))  # noqa: PERF401 - end what there is
        call.given.clear()  # what was sent lies in shared memory now
        if plan.stream:
            reader = reader_of(context, request, Place(plan.lanes), stored=plan.stored)
            return await stream_to(reader, plan, streams, watch)
        return await whole(plan, streams, watch)


@contextmanager
def attended(streams: list[RequestStream], *, stored: bool) -> Iterator[None]:
    """Around the answering of requests, which end with it.

    Those that gave everything are forgotten by the broker. A caller that leaves early, or another choice's
    failure, cancels what still runs, or leaves stored requests to themselves.
    """
    try:
        yield
    except BaseException:
        for stream in streams:
            stream.leave() if stored else stream.abort()
        raise
    for stream in streams:
        if stream.ended:
            stream.done()
        else:  # the error of another choice has been told in the stream
            stream.leave() if stored else stream.abort()


def reader_of(context: Context, request: web.Request, place: Place, *, stored: bool) -> Reader:
    """Who an answer is streamed to. Those who say `Accept: text/event-stream` get ids with their events."""
    ids = stored or "text/event-stream" in request.headers.get("Accept", "")
    return Reader(request, context.settings.stall_s, place, ids)


async def stream_to(
    reader: Reader, plan: AnyPlan, streams: list[RequestStream], watch: Watch
) -> web.StreamResponse:
    """Sends pieces as they come. An error before the first is raised."""
    if isinstance(plan, ChatPlan):
        return await chat_stream.respond(reader, plan, streams, watch)
    if isinstance(plan, SpeechPlan):
        return await speech_answer.respond(reader, plan, streams[0], watch)
    if isinstance(plan, ImagesPlan):
        return await images_answer.respond(reader, plan, streams, watch)
    if isinstance(plan, VideoPlan):
        return await video_answer.respond(reader, streams[0])
    return await transcript.respond(reader, plan, streams[0], watch)


async def whole(plan: AnyPlan, streams: list[RequestStream], watch: Watch) -> web.Response:
    """The answer in one piece, when it is complete."""
    if isinstance(plan, ChatPlan):
        return await chat_whole.respond(plan, streams, watch)
    if isinstance(plan, SpeechPlan):
        return await speech_answer.whole(plan, streams[0], watch)
    if isinstance(plan, ImagesPlan):
        return await images_answer.whole(plan, streams, watch)
    if isinstance(plan, VideoPlan):
        return await video_answer.whole(streams[0])
    return await transcript.whole(plan, streams[0], watch)
