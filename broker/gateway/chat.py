"""POST /v1/chat/completions: from the body to requests at the broker, and the unstreamed answer."""

from __future__ import annotations

import base64
import time

import msgspec
from aiohttp import web
from msgspec import UNSET

from broker.client import RequestStream
from broker.gateway import chat_stream, completion, messages, params, schemas, usage
from broker.gateway.answer import Answer
from broker.gateway.context import Call, Context, parse, stage_metrics, together
from broker.gateway.errors import ApiError
from broker.gateway.media import SAMPLE_RATE
from broker.gateway.models import AUDIO, TEXT, Model
from broker.gateway.plan import ChatPlan
from broker.gateway.schemas import ChatRequest
from pipelines.graph import Endpoint

_decode = msgspec.json.Decoder(ChatRequest).decode


class Chat:
    """The endpoint's handler."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers one request. Its requests at the broker end with it, however it ends."""
        body = parse(_decode, await request.read())
        plan = await self._plan(body, request["id"])
        streams: list[RequestStream] = []
        try:
            for number in range(plan.choices):
                streams.append(await self._context.submit(plan.call, number))  # noqa: PERF401 - abort what there is
            if plan.stream:
                return await chat_stream.respond(request, plan, streams, self._context.settings)
            return await self._whole(plan, streams)
        finally:
            for stream in streams:
                stream.abort()

    async def _plan(self, body: ChatRequest, request_id: str) -> ChatPlan:
        context = self._context
        model = context.link.model(body.model)
        watch = context.metrics.watch(model.name)
        endpoint = model.endpoint("chat")
        schemas.refuse_unsupported(body)
        modalities = _modalities(body, model, endpoint)
        choices = body.n or 1
        if choices > context.settings.max_choices:
            raise ApiError(f"n: at most {context.settings.max_choices}", "n", code="invalid_value")
        if body.stream_options is not None and not body.stream:
            raise ApiError("stream_options needs stream: true", "stream_options")
        stage_params = params.for_chat(model, body)
        wanted = body.audio or schemas.AudioOut()
        voice = model.voice(wanted.voice, "audio.voice")
        if AUDIO in modalities:
            params.add_speech(model, stage_params, voice, None)
        payload = await messages.to_payload(body.messages, model, context.settings)
        clips = payload.get("audio", [])
        transcribe = AUDIO in modalities and TEXT not in modalities and model.transcribes(endpoint)
        call = Call(
            model=model,
            outputs=[*modalities, TEXT] if transcribe else modalities,
            given={endpoint.input: [payload]},
            params=stage_params,
            has=[AUDIO] if clips else [],
            seed=body.seed,
            priority=body.priority or 0,
        )
        return ChatPlan(
            call=call,
            id=f"chatcmpl-{request_id}",
            request_id=request_id,
            created=int(time.time()),
            modalities=modalities,
            audio_format=wanted.format or "wav",
            choices=choices,
            stream=bool(body.stream),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            include_metrics=bool(body.metrics),
            heard_tokens=usage.heard_tokens(sum(map(len, clips)) / SAMPLE_RATE),
            watch=watch,
        )

    async def _whole(self, plan: ChatPlan, streams: list[RequestStream]) -> web.Response:
        answers = [plan.answer(whole=True) for _ in streams]
        choices: list[completion.Choice] = [None] * len(streams)  # type: ignore[list-item]

        async def collect(index: int) -> None:
            choices[index] = await _collect(plan, index, streams[index], answers[index])

        await together(*(collect(index) for index in range(len(streams))))
        plan.finished(answers)
        body = completion.Completion(
            id=plan.id,
            created=plan.created,
            model=plan.call.model.name,
            choices=choices,
            usage=plan.usage(answers),
            metrics=stage_metrics(streams[0]) if plan.include_metrics else UNSET,
        )
        return web.Response(body=completion.encode(body), content_type="application/json")


async def _collect(plan: ChatPlan, index: int, stream: RequestStream, answer: Answer) -> completion.Choice:
    """Reads one request to its end."""
    text: list[str] = []
    speech: list[bytes] = []
    async for output, payload in stream:
        more_text, more_speech = await answer.take(output, payload)
        text.append(more_text)
        speech.append(more_speech)
    speech.append(await answer.finish())
    message = completion.Message(content="".join(text) if TEXT in plan.modalities else None)
    if answer.speech is not None:
        data = base64.b64encode(b"".join(speech)).decode("ascii")
        message.audio = completion.Audio(plan.audio_id(index), data, int(time.time()), "".join(text))
    return completion.Choice(index=index, message=message, finish_reason=answer.finish_reason)


def _modalities(body: ChatRequest, model: Model, endpoint: Endpoint) -> list[str]:
    """What the answer shall hold. Raises ApiError that lists what there is for anything else."""
    offered = model.modalities(endpoint)
    if not offered:
        raise ApiError(
            f"{model.name} gives neither text nor audio to a chat", "model", code="unsupported_model"
        )
    wanted = body.modalities
    if wanted is None:
        return offered[:1]
    if not wanted or len(set(wanted)) != len(wanted) or not set(wanted) <= set(offered):
        raise ApiError(
            f"modalities must be one or more of {', '.join(offered)}, each once",
            "modalities",
            code="unsupported_modality",
        )
    return [name for name in offered if name in wanted]
