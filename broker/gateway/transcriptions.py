"""POST /v1/audio/transcriptions: a file in, its text out."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from broker.gateway import forms, media
from broker.gateway.answering import answer
from broker.gateway.context import Call, Context
from broker.gateway.errors import ApiError
from broker.gateway.models import Model
from broker.gateway.plan import TranscriptPlan
from broker.gateway.schemas import TranscriptionForm
from pipelines.graph import Endpoint


class Transcriptions:
    """The endpoint's handler."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers one call."""
        settings = self._context.settings
        sent = await forms.read(request, {"file": int(settings.max_audio_mb * 2**20)}, settings.stall_s)
        form, data = sent.convert(TranscriptionForm), sent.file("file")
        if data is None:
            raise ApiError("file is required", "file")
        del sent
        model = await self._context.link.accepting(form.model)
        endpoint = model.endpoint("transcriptions")
        if form.stream and form.response_format not in ("json", "text"):
            raise ApiError("a stream needs response_format json or text", "response_format")
        samples = await media.decode(data, "file", max_s=settings.max_audio_s)
        self._context.room.hold(samples)
        granular = form.timestamp_granularities
        plan = TranscriptPlan(
            id=request["id"],
            model=model.name,
            created=int(time.time()),
            tenant=request["tenant"],
            stream=form.stream,
            seconds=len(samples) / media.SAMPLE_RATE,
            language=form.language,
            format=form.response_format,
            segments=granular is msgspec.UNSET or "segment" in granular,
        )
        call = _call(model, endpoint, form, samples)
        del data, samples  # they need not stay for as long as the answer takes
        return await answer(self._context, request, call, plan)


def _call(model: Model, endpoint: Endpoint, form: TranscriptionForm, samples: object) -> Call:
    output = endpoint.outputs[0]
    wanted = {"language": form.language, "prompt": form.prompt, "temperature": form.temperature}
    params = {name: value for name, value in wanted.items() if value is not None}
    return Call(
        model=model,
        outputs=[output],
        given={endpoint.input: [{"messages": [], "audio": [samples]}]},
        params={model.pipeline.outputs[output]: params} if params else {},
        has=["audio"],
        deadline_s=form.timeout_s,
    )
