"""POST /v1/images/generations and /v1/images/edits: words, and perhaps pictures, to pictures."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from aiohttp import web

from adapters.chunk import Payload
from broker.gateway import drawing, forms, picture_schemas, pictures, usage
from broker.gateway.answering import answer
from broker.gateway.context import SEEDS, Call, Context, parsed
from broker.gateway.errors import ApiError
from broker.gateway.models import IMAGE, Model
from broker.gateway.picture_schemas import Drawing, EditsForm, ImagesRequest
from broker.gateway.plan import ImagesPlan
from broker.gateway.uploads import Pixels
from pipelines.graph import Endpoint

_decoder = msgspec.json.Decoder(ImagesRequest)


class Images:
    """The handlers."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """New pictures."""
        body = await parsed(request, _decoder, self._context.settings.stall_s)
        model = await self._context.link.accepting(body.model)
        return await self._answer(request, body, model, {})

    async def edit(self, request: web.Request) -> web.StreamResponse:
        """Given pictures, changed."""
        settings = self._context.settings
        most = int(settings.max_image_mb * 2**20)
        form = await forms.read(request, {"image": most, "mask": most}, settings.stall_s)
        body = form.convert(EditsForm)
        model = await self._context.link.accepting(body.model)
        endpoint = model.endpoint("edits")
        images = form.files.get("image", [])
        if not images:
            raise ApiError("image is required", "image", code="invalid_value")
        if len(images) > settings.max_images:
            raise ApiError(f"image: more than {settings.max_images} images", "image", code="too_many_images")
        self._check(body, endpoint)  # before any picture is looked into
        pixels = Pixels(settings.max_pixels_mp)
        given: Payload = {"images": []}
        for number, data in enumerate(images):
            field = "image" if len(images) == 1 else f"image[{number}]"
            given["images"].append(await self._decoded(pictures.decode, data, field, pixels))
        mask = form.file("mask")
        if mask is not None:
            given["mask"] = await self._decoded(pictures.decode_mask, mask, "mask", pixels)
            _check_mask(given["mask"], given["images"][0])
        del form, images, mask  # their bytes need not stay
        return await self._answer(request, body, model, given)

    async def _decoded(self, decode: Any, data: bytes, field: str, pixels: Pixels) -> Any:
        array = await decode(data, field, max_mp=self._context.settings.max_image_mp)
        pixels.take(array.shape[0] * array.shape[1], field)
        self._context.room.hold(array)
        return array

    def _check(self, body: ImagesRequest, endpoint: Endpoint) -> dict[str, Any]:
        picture_schemas.refuse_unsupported(body)
        if body.response_format not in (None, "b64_json"):
            raise ApiError(
                "response_format: b64_json alone; nothing here is served by link",
                "response_format",
                code="unsupported_parameter",
            )
        if body.output_compression not in (None, 100) and body.output_format in (None, "png"):
            raise ApiError(
                "output_compression needs output_format jpeg or webp",
                "output_compression",
                code="invalid_value",
            )
        return drawing.pictures(body, endpoint, self._context.settings.max_choices)

    async def _answer(
        self, request: web.Request, body: ImagesRequest, model: Model, given: Payload
    ) -> web.StreamResponse:
        """Answers a call; ``given``: what came along, as the pipelines get it."""
        edits = bool(given)
        endpoint = model.endpoint("edits" if edits else "images")
        asked = self._check(body, endpoint)
        seed = seed_of(body.seed)
        plan = ImagesPlan(
            id=request["id"],
            model=model.name,
            created=int(time.time()),
            tenant=request["tenant"],
            stored=bool(body.store),
            choices=body.n or 1,
            stream=bool(body.stream),
            events="image_edit" if edits else "image_generation",
            format=body.output_format or "png",
            quality=100 if body.output_compression is None else body.output_compression,
            seed=seed,
            text_tokens=len(body.prompt) + len(body.negative_prompt or ""),
            image_tokens=sum(usage.seen_tokens(*image.shape[1::-1]) for image in given.get("images", [])),
        )
        call = Call(
            model=model,
            outputs=[IMAGE],
            given={endpoint.input: [to_payload(body) | given]},
            params=drawing.for_stages(model, endpoint, asked, body.sampling_params_list),
            has=[IMAGE] if edits else [],
            seed=seed,
            priority=body.priority or 0,
            deadline_s=body.timeout_s,
        )
        del body, given  # they need not stay for as long as the answer takes
        return await answer(self._context, request, call, plan)


def _check_mask(mask: Any, image: Any) -> None:
    if mask.shape != image.shape[:2]:
        (height, width), (rows, columns) = image.shape[:2], mask.shape
        raise ApiError(
            f"mask: {columns} x {rows} pixels; the picture has {width} x {height}",
            "mask",
            code="invalid_image",
        )


def to_payload(body: Drawing) -> Payload:
    """What the pipelines get of a body: ``{"prompt"}``, and "negative_prompt" where there is one."""
    if body.negative_prompt is None:
        return {"prompt": body.prompt}
    return {"prompt": body.prompt, "negative_prompt": body.negative_prompt}


def seed_of(wanted: int | None) -> int:
    """The seed of a call's first picture: the caller's, or one that is drawn now, so that it can be told."""
    return secrets.randbits(32) if wanted is None else wanted % SEEDS
