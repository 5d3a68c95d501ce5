"""/v1/videos: films as jobs. Each is a stored request: it outlives its caller, the gateway and the broker."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
from aiohttp import web

from adapters.chunk import Payload
from broker.client import RequestStream
from broker.gateway import drawing, forms, picture_schemas, pictures, plan, uploads, video_answer
from broker.gateway.answering import attended
from broker.gateway.context import Call, Context, parsed
from broker.gateway.errors import ApiError, from_decoding
from broker.gateway.fetch import fetcher
from broker.gateway.images import seed_of, to_payload
from broker.gateway.models import IMAGE, VIDEO, Model
from broker.gateway.picture_schemas import VideosRequest
from broker.gateway.plan import VideoPlan
from broker.gateway.requests import Report, Requests, unknown
from broker.protocol import Timing

PREFIX = "video_"  #: of a job's id; what follows is the id of its call

#: How a request stands -> how its job does.
_STATUS = {"queued": "queued", "running": "in_progress", "done": "completed"}

_decoder = msgspec.json.Decoder(VideosRequest)


class _Page(msgspec.Struct):
    """Which of the jobs are listed."""

    after: str | None = None
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"


class Videos:
    """The handlers."""

    def __init__(self, context: Context, requests: Requests) -> None:
        self._context = context
        self._requests = requests

    async def create(self, request: web.Request) -> web.Response:
        """Begins a film, and says what it is called."""
        data: bytes | None = None
        if request.content_type == "multipart/form-data":
            most = int(self._context.settings.max_image_mb * 2**20)
            form = await forms.read(request, {"input_reference": most}, self._context.settings.stall_s)
            body, data = form.convert(VideosRequest), form.file("input_reference")
        else:
            body = await parsed(request, _decoder, self._context.settings.stall_s)
        model = await self._context.link.accepting(body.model)
        endpoint = model.endpoint("videos")
        picture_schemas.refuse_unsupported(body)
        asked = drawing.film(body, endpoint)
        given = await self._reference(body, data, model)
        made = VideoPlan(
            id=request["id"],
            model=model.name,
            created=int(time.time()),
            tenant=request["tenant"],
            stored=True,
            prompt=body.prompt,
            size=body.size or drawing.AUTO,
            seconds=_seconds(asked),
            seed=seed_of(body.seed),
            keep_s=endpoint.keep_s,
        )
        call = Call(
            model=model,
            outputs=[VIDEO],
            given={endpoint.input: [to_payload(body) | given]},
            params=drawing.for_stages(model, endpoint, asked, body.sampling_params_list),
            has=[IMAGE] if "images" in given else [],
            seed=made.seed,
            priority=body.priority or 0,
            deadline_s=body.timeout_s,
            keep_s=endpoint.keep_s,
        )
        streams: list[RequestStream] = []
        with attended(streams, stored=True):
            streams.append(await self._context.submit(call, made, 0))
        return _json(_job(made, None))

    async def _reference(self, body: VideosRequest, data: bytes | None, model: Model) -> Payload:
        """{"images": the picture that the film begins with}, if there is one."""
        field = "input_reference"
        if data is None and body.input_reference is None:
            return {}
        if IMAGE not in model.inputs:
            raise ApiError(f"{field}: {model.name} takes no images", field, code="unsupported_modality")
        settings = self._context.settings
        if data is None:
            assert body.input_reference is not None
            field = f"{field}.image_url"
            source = fetcher(settings, IMAGE, settings.max_image_mb)
            data = await uploads.load(body.input_reference.image_url, field, source)
        picture = await pictures.decode(data, field, max_mp=settings.max_image_mp)
        self._context.room.hold(picture)
        return {"images": [picture]}

    async def retrieve(self, request: web.Request) -> web.Response:
        """How a job stands."""
        made, report = await self._find(request)
        return _json(_job(made, report))

    async def listing(self, request: web.Request) -> web.Response:
        """The caller's jobs."""
        try:
            page = msgspec.convert(dict(request.query), _Page, strict=False)
        except msgspec.ValidationError as error:
            raise from_decoding(error, kind=_Page) from None
        if not 1 <= page.limit <= 100:
            raise ApiError(f"limit: {page.limit}; from 1 to 100", "limit", code="invalid_value")
        client = await self._context.link.reach()
        found = (await client.inspect("stored", request["tenant"]))["requests"]
        jobs = [_job(made, report) for report in found if (made := _video(report)) is not None]
        jobs.sort(key=lambda job: (job["created_at"], job["id"]), reverse=page.order == "desc")
        ids = [job["id"] for job in jobs]
        if page.after is not None:
            if page.after not in ids:
                raise ApiError(f"after: no video {page.after[:80]!r}", "after", code="invalid_value")
            jobs = jobs[ids.index(page.after) + 1 :]
        shown = jobs[: page.limit]
        return _json(
            {
                "object": "list",
                "data": shown,
                "first_id": shown[0]["id"] if shown else None,
                "last_id": shown[-1]["id"] if shown else None,
                "has_more": len(shown) < len(jobs),
            }
        )

    async def content(self, request: web.Request) -> web.Response:
        """The film, when it is complete. A job that failed answers with its error."""
        variant = request.query.get("variant", "video")
        if variant != "video":
            raise ApiError("variant: there is none but video", "variant", code="unsupported_parameter")
        made, report = await self._find(request)
        if report["state"] in ("queued", "running"):
            raise ApiError("the video is not ready yet", status=409, code="not_ready", retry_after_s=1.0)
        streams: list[RequestStream] = []
        with attended(streams, stored=True):
            await self._requests.attach(made, [report], streams)
            return await video_answer.part(request, streams[0])

    async def delete(self, request: web.Request) -> web.Response:
        """Ends a job, and forgets all of it."""
        made, _ = await self._find(request)
        await self._requests.end(made)
        client = await self._context.link.reach()
        await client.letters("drop", plan.request_name(made.id, 0))
        return _json({"id": PREFIX + made.id, "object": "video.deleted", "deleted": True})

    async def _find(self, request: web.Request) -> tuple[VideoPlan, Report]:
        name = request.match_info["id"]
        found, reports = await self._requests.find(request, name.removeprefix(PREFIX))
        if not isinstance(found, VideoPlan):
            raise unknown(name)
        return found, reports[0]


def _video(report: Report) -> VideoPlan | None:
    """The plan of a stored request, if it is one for a film."""
    try:
        found = plan.decode(report["call"])
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, VideoPlan) else None


def _seconds(asked: dict[str, Any]) -> str:
    frames, fps = asked.get("num_frames"), asked.get("fps")
    return f"{frames / fps:g}" if frames and fps else drawing.AUTO


def _job(made: VideoPlan, report: Report | None) -> dict[str, Any]:
    """The job as the API shows it; without a report it has just been accepted."""
    state = "queued" if report is None else report["state"]
    job: dict[str, Any] = {
        "id": PREFIX + made.id,
        "object": "video",
        "model": made.model,
        "status": _STATUS.get(state, "failed"),
        "progress": 0,
        "created_at": made.created,
        "completed_at": None,
        "expires_at": None,
        "prompt": made.prompt,
        "size": made.size,
        "seconds": made.seconds,
        "seed": made.seed,
        "error": None,
    }
    if report is None:
        return job
    done = list(report["progress"].values())
    job["progress"] = 100 if state == "done" else min(int(100 * sum(done) / max(len(done), 1)), 99)
    if state == "done":
        ended = max(timing.ended for timing in msgspec.convert(report["stages"], list[Timing]))
        job["completed_at"] = made.created + round(ended)
        job["expires_at"] = job["completed_at"] + round(made.keep_s)
    if (error := report["error"]) is not None:
        job["error"] = {"code": error["type"], "message": error["message"]}
    return job


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
