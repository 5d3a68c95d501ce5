"""POST /v1/audio/speech: text in, speech out, sent as it is made."""

from __future__ import annotations

import msgspec
from aiohttp import web

from broker.client import RequestStream
from broker.gateway import audio, params, usage
from broker.gateway.answer import Base64Pieces, Speech
from broker.gateway.context import Call, Context, parse
from broker.gateway.errors import ApiError
from broker.gateway.metrics import Watch
from broker.gateway.models import AUDIO
from broker.gateway.schemas import SpeechRequest
from broker.gateway.sse import Body, Events

_decode = msgspec.json.Decoder(SpeechRequest).decode
_encode = msgspec.json.Encoder().encode


class SpeechEndpoint:
    """The endpoint's handler."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers one request. Its request at the broker ends with it, however it ends."""
        body = parse(_decode, await request.read())
        call = self._call(body)
        watch = self._context.metrics.watch(call.model.name)
        speech = Speech(body.response_format or "mp3", whole=body.stream is False)
        stream = await self._context.submit(call)
        try:
            if body.stream_format == "sse":
                return await self._events(request, body, stream, speech, watch)
            if body.stream is False:
                return await self._whole(stream, speech, watch)
            return await self._stream(request, stream, speech, watch)
        finally:
            stream.abort()

    def _call(self, body: SpeechRequest) -> Call:
        model = self._context.link.model(body.model)
        endpoint = model.endpoint("speech")
        if AUDIO not in endpoint.outputs:
            raise ApiError(f"{model.name} does not speak", "model", code="unsupported_model")
        if not body.input.strip():
            raise ApiError("input must hold some text", "input", code="invalid_value")
        if body.instructions and body.instructions.strip():
            raise ApiError(
                f"{model.name}'s voice follows no instructions", "instructions", code="unsupported_parameter"
            )
        if body.stream_format == "sse" and body.stream is False:
            raise ApiError("stream: false contradicts stream_format: sse", "stream")
        stage_params = params.from_list(model, body.sampling_params_list)
        params.add_speech(model, stage_params, model.voice(body.voice, "voice"), body.speed)
        return Call(
            model=model,
            outputs=[AUDIO],
            given={endpoint.input: [{"text": body.input}]},
            params=stage_params,
            seed=body.seed,
        )

    async def _stream(
        self, request: web.Request, stream: RequestStream, speech: Speech, watch: Watch
    ) -> web.StreamResponse:
        """Raw bytes. A failure in the middle cuts the connection: there is no place for an error object."""
        out: Body | None = None
        try:
            async for _, payload in stream:
                watch.first_audio()
                data = await speech.feed(payload)
                del payload  # its memory goes back before we wait for the client
                if out is None:
                    kind = audio.content_type(speech.format, speech.sample_rate)
                    out = Body(request, kind, self._context.settings.stall_s)
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

    async def _whole(self, stream: RequestStream, speech: Speech, watch: Watch) -> web.Response:
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

    async def _events(
        self, request: web.Request, body: SpeechRequest, stream: RequestStream, speech: Speech, watch: Watch
    ) -> web.StreamResponse:
        events = Events(request, self._context.settings.stall_s)
        pieces = Base64Pieces()

        async def send(texts: list[str]) -> None:
            for text in texts:
                await events.send(_encode({"type": "speech.audio.delta", "audio": text}))

        async with events.whole(request["id"]):
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
            await events.send(_encode({"type": "speech.audio.done", "usage": _usage(body, speech)}))
        return events.response


def _silence() -> ApiError:
    return ApiError("input holds nothing that can be spoken", "input", code="nothing_to_speak")


def _usage(body: SpeechRequest, speech: Speech) -> dict[str, int]:
    """Input is counted in characters: nothing on this path has a tokenizer."""
    heard, spoken = len(body.input), usage.spoken_tokens(speech.seconds)
    return {"input_tokens": heard, "output_tokens": spoken, "total_tokens": heard + spoken}
