"""POST /v1/audio/transcriptions: a file in, its text out."""

from __future__ import annotations

import time

import msgspec
from aiohttp import BodyPartReader, web

from broker.gateway import media
from broker.gateway.answering import answer
from broker.gateway.context import Call, Context
from broker.gateway.errors import ApiError, from_decoding
from broker.gateway.models import Model
from broker.gateway.plan import TranscriptPlan
from broker.gateway.schemas import TranscriptionForm
from pipelines.graph import Endpoint

MAX_FIELD = 64 * 1024  #: bytes of a form field that is no file
MAX_FIELDS = 32


class Transcriptions:
    """The endpoint's handler."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers one call."""
        form, data = await self._read(request)
        model = await self._context.link.accepting(form.model)
        endpoint = model.endpoint("transcriptions")
        if form.stream and form.response_format not in ("json", "text"):
            raise ApiError("a stream needs response_format json or text", "response_format")
        samples = await media.decode(data, "file", max_s=self._context.settings.max_audio_s)
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

    async def _read(self, request: web.Request) -> tuple[TranscriptionForm, bytes]:
        """The form's fields and the file, neither larger than allowed."""
        if request.content_type != "multipart/form-data":
            raise ApiError("send a multipart/form-data body with a file", "file")
        fields: dict[str, str | list[str]] = {}
        data: bytes | None = None
        try:
            reader = await request.multipart()
            for _ in range(MAX_FIELDS):
                part = await reader.next()
                if part is None:
                    break
                if not isinstance(part, BodyPartReader) or part.name is None:
                    raise ApiError("a part of the form has no name", code="invalid_form")
                if part.name == "file":
                    data = await _bounded(part, int(self._context.settings.max_audio_mb * 2**20))
                else:
                    _add(fields, part.name, (await _bounded(part, MAX_FIELD)).decode())
            else:
                raise ApiError(f"more than {MAX_FIELDS} form fields", code="invalid_form")
        except (ValueError, RuntimeError) as error:  # what aiohttp raises for a broken multipart body
            raise ApiError(f"the form can't be read: {error}", code="invalid_form") from None
        try:
            form = msgspec.convert(fields, TranscriptionForm, strict=False)
        except msgspec.ValidationError as error:
            raise from_decoding(error) from None
        if data is None:
            raise ApiError("file is required", "file")
        return form, data


def _add(fields: dict[str, str | list[str]], name: str, value: str) -> None:
    """``name[]`` may come several times and makes a list. Raises ApiError where `name` came too."""
    if name.endswith("[]"):
        values = fields.setdefault(name[:-2], [])
        if not isinstance(values, list):
            raise ApiError(f"{name[:-2]}: once with [] and once without", name[:-2], code="invalid_form")
        values.append(value)
    else:
        fields[name] = value


async def _bounded(part: BodyPartReader, limit: int) -> bytes:
    """A part's bytes. Raises ApiError (413) as soon as there are too many."""
    data = bytearray()
    while chunk := await part.read_chunk(64 * 1024):
        data += chunk
        if len(data) > limit:
            raise ApiError(f"{part.name}: larger than {limit} bytes", part.name, status=413, code="too_large")
    return bytes(data)


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
