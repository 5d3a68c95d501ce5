"""The spoken answer to POST /v1/audio/speech: raw bytes or events as they are made, or a whole file."""

from __future__ import annotations

import msgspec
from aiohttp import web

from broker.client import RequestStream
from broker.gateway import audio, usage
from broker.gateway.answer import Base64Pieces, Speech
from broker.gateway.errors import ApiError
from broker.gateway.metrics import Watch
from broker.gateway.plan import SpeechPlan
from broker.gateway.sse import Events, RawBody, Reader

_encode = msgspec.json.Encoder().encode


async def respond(
    reader: Reader, plan: SpeechPlan, stream: RequestStream, watch: Watch
) -> web.StreamResponse:
    """Sends what comes as it comes. A call that wants the file whole gets the same bytes, at the end."""
    speech = Speech(plan.format, whole=not plan.stream)
    if plan.events:
        return await _events(reader, plan, stream, speech, watch)
    return await _bytes(reader, stream, speech, watch)


async def whole(plan: SpeechPlan, stream: RequestStream, watch: Watch) -> web.Response:
    """The file, with true sizes in its header."""
    speech = Speech(plan.format, whole=True)
    parts = []
    async for _, payload in stream:
        watch.first_audio()
        parts.append(await speech.feed(payload))
    parts.append(await speech.finish())
    if not speech.samples:
        raise _silence()
    watch.done(speech.seconds)
    kind = audio.content_type(speech.format, speech.sample_rate)
    return web.Response(body=b"".join(parts), headers={"Content-Type": kind})


async def _bytes(reader: Reader, stream: RequestStream, speech: Speech, watch: Watch) -> web.StreamResponse:
    """Raw bytes. A failure in the middle cuts the connection: there is no place for an error object."""
    out: RawBody | None = None
    try:
        async for _, payload in stream:
            watch.first_audio()
            data = await speech.feed(payload)
            del payload  # its memory goes back before we wait for the client
            if out is None:
                out = RawBody(reader, audio.content_type(speech.format, speech.sample_rate))
            if data:
                await out.write(data)
        tail = await speech.finish()
        if out is None or not speech.samples:
            raise _silence()
        if tail:
            await out.write(tail)
    except Exception:
        if out is not None and out.started:
            out.cut()
        raise
    watch.done(speech.seconds)
    return await out.finish()


async def _events(
    reader: Reader, plan: SpeechPlan, stream: RequestStream, speech: Speech, watch: Watch
) -> web.StreamResponse:
    events = Events(reader)
    pieces = Base64Pieces()
    if plan.stored:
        await events.begin()  # the headers tell the id, by which the answer can be fetched from now on

    async def send(texts: list[str]) -> None:
        for text in texts:
            await events.send(_encode({"type": "speech.audio.delta", "audio": text}))

    async with events.whole(plan.id):
        async for _, payload in stream:
            watch.first_audio()
            data = await speech.feed(payload)
            del payload  # its memory goes back before we wait for the client
            await send(pieces.feed(data))
        rest = await speech.finish()
        if not speech.samples:
            raise _silence()
        await send(pieces.feed(rest) + pieces.finish())
        watch.done(speech.seconds)
        await events.send(_encode({"type": "speech.audio.done", "usage": _usage(plan, speech)}))
    return events.response


def _silence() -> ApiError:
    return ApiError("input holds nothing that can be spoken", "input", code="nothing_to_speak")


def _usage(plan: SpeechPlan, speech: Speech) -> dict[str, int]:
    """Input is counted in characters: nothing on this path has a tokenizer."""
    heard, spoken = plan.characters, usage.spoken_tokens(speech.seconds)
    return {"input_tokens": heard, "output_tokens": spoken, "total_tokens": heard + spoken}
