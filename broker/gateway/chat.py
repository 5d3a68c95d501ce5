"""POST /v1/chat/completions: from the body to requests at the broker."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from broker.gateway import drawing, messages, params, schemas, usage
from broker.gateway.answering import answer
from broker.gateway.context import Call, Context, parsed
from broker.gateway.errors import ApiError
from broker.gateway.media import SAMPLE_RATE
from broker.gateway.models import AUDIO, IMAGE, TEXT, VIDEO, Model
from broker.gateway.plan import ChatPlan
from broker.gateway.schemas import ChatRequest
from pipelines.graph import Endpoint

#: Input modality -> the payload's field that carries it.
_CARRIED = {AUDIO: "audio", IMAGE: "images", VIDEO: "videos"}

_decoder = msgspec.json.Decoder(ChatRequest)


class Chat:
    """The endpoint's handler."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers one call."""
        body = await parsed(request, _decoder, self._context.settings.stall_s)
        model = await self._context.link.accepting(body.model)
        call, plan = await self._plan(body, model, request)
        del body  # its clips and pictures need not stay for as long as the answer takes
        return await answer(self._context, request, call, plan)

    async def _plan(self, body: ChatRequest, model: Model, request: web.Request) -> tuple[Call, ChatPlan]:
        settings = self._context.settings
        endpoint = model.endpoint("chat")
        schemas.refuse_unsupported(body)
        modalities = _modalities(body, model, endpoint)
        choices = body.n or 1
        if choices > settings.max_choices:
            raise ApiError(f"n: at most {settings.max_choices}", "n", code="invalid_value")
        if body.stream_options is not None and not body.stream:
            raise ApiError("stream_options needs stream: true", "stream_options")
        stage_params = params.for_chat(model, body)
        wanted = body.audio or schemas.AudioOut()
        voice = model.voice(wanted.voice, "audio.voice")
        if AUDIO in modalities:
            params.add_speech(model, stage_params, voice, None)
        stage_params = drawing.for_chat(model, stage_params, body, draws=IMAGE in modalities)
        reading = body.mm_processor_kwargs or schemas.ProcessorOptions()
        payload = await messages.to_payload(
            body.messages,
            model,
            settings,
            room=self._context.room,
            sound_in_videos=bool(reading.use_audio_in_video),
        )
        if IMAGE in modalities:
            payload |= drawing.asked(body.messages, body.negative_prompt)
        clips = payload.get("audio", [])
        transcribe = AUDIO in modalities and TEXT not in modalities and model.transcribes(endpoint)
        call = Call(
            model=model,
            outputs=[*modalities, TEXT] if transcribe else modalities,
            given={endpoint.input: [payload]},
            params=stage_params,
            has=[name for name, field in _CARRIED.items() if field in payload],
            seed=body.seed,
            priority=body.priority or 0,
            deadline_s=body.timeout_s,
        )
        plan = ChatPlan(
            id=request["id"],
            model=model.name,
            created=int(time.time()),
            tenant=request["tenant"],
            stored=bool(body.store),
            choices=choices,
            stream=bool(body.stream),
            modalities=modalities,
            outputs=call.outputs,
            audio_format=wanted.format or "wav",
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            include_metrics=bool(body.metrics),
            heard_tokens=usage.heard_tokens(sum(map(len, clips)) / SAMPLE_RATE),
        )
        return call, plan


def _modalities(body: ChatRequest, model: Model, endpoint: Endpoint) -> list[str]:
    """What the answer shall hold. Raises ApiError that lists what there is for anything else."""
    offered = model.modalities(endpoint)
    if not offered:
        raise ApiError(
            f"{model.name} gives no text, audio or image to a chat", "model", code="unsupported_model"
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
