"""POST /v1/audio/speech: text in, speech out, sent as it is made."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from broker.gateway import params, schemas
from broker.gateway.answering import answer
from broker.gateway.context import Call, Context, parsed
from broker.gateway.errors import ApiError
from broker.gateway.models import AUDIO, Model
from broker.gateway.plan import SpeechPlan
from broker.gateway.schemas import SpeechRequest

_decoder = msgspec.json.Decoder(SpeechRequest)


class SpeechEndpoint:
    """The endpoint's handler."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers one call."""
        body = await parsed(request, _decoder, self._context.settings.stall_s)
        model = await self._context.link.accepting(body.model)
        plan = SpeechPlan(
            id=request["id"],
            model=model.name,
            created=int(time.time()),
            tenant=request["tenant"],
            stored=bool(body.store),
            stream=body.stream is not False,
            format=body.response_format or "mp3",
            characters=len(body.input),
            events=body.stream_format == "sse",
        )
        return await answer(self._context, request, _call(body, model), plan)


def _call(body: SpeechRequest, model: Model) -> Call:
    endpoint = model.endpoint("speech")
    if AUDIO not in endpoint.outputs:
        raise ApiError(f"{model.name} does not speak", "model", code="unsupported_model")
    if not body.input.strip():
        raise ApiError("input must hold some text", "input", code="invalid_value")
    if body.instructions and body.instructions.strip():
        raise ApiError(
            f"{model.name}'s voice follows no instructions", "instructions", code="unsupported_parameter"
        )
    schemas.refuse_unsupported(body, {"extra_body": ({},)})
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
        deadline_s=body.timeout_s,
    )
