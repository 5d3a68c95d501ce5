"""Bodies of the endpoints for pictures and videos. What a pipeline's own bounds are is checked in
:mod:`broker.gateway.drawing`, since they are the pipeline's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from broker.gateway import schemas
from broker.gateway.errors import ApiError
from broker.gateway.schemas import Number, Seed, Timeout, Unwanted

Prompt = Annotated[str, Meta(min_length=1, max_length=32_000)]
Percent = Annotated[int, Meta(ge=0, le=100)]
Seconds = Annotated[float, Meta(gt=0, le=3600)] | Annotated[str, Meta(pattern=r"^\d{1,4}(\.\d{1,3})?$")]


class Drawing(msgspec.Struct, kw_only=True):
    """What all these bodies have in common; how it is made, under diffusers' names."""

    prompt: Prompt
    num_inference_steps: Number | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    guidance_scale_2: float | None = None
    size: str | None = None
    negative_prompt: Unwanted | None = None
    model: str | None = None
    seed: Seed | None = None
    sampling_params_list: list[dict[str, Any] | None] | None = None
    priority: Number | None = None
    timeout_s: Timeout | None = None
    user: str | None = None
    quality: Any = None
    style: Any = None
    background: Any = None
    moderation: Any = None
    input_fidelity: Any = None
    extra_body: Any = None
    width: Any = None
    height: Any = None
    num_images_per_prompt: Any = None


#: Field -> values that ask for nothing, see :data:`broker.gateway.schemas.NEUTRAL`.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quality": ("auto", "standard"),
    "style": (),
    "background": ("auto", "opaque"),
    "moderation": ("auto", "low"),
    "input_fidelity": ("low",),
    "extra_body": ({},),
    "width": (),
    "height": (),
    "num_images_per_prompt": (1,),
}


class ImagesRequest(Drawing, kw_only=True):
    """Body of POST /v1/images/generations."""

    n: Number | None = None
    stream: bool | None = None
    partial_images: Number | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Percent | None = None
    response_format: str | None = None
    store: bool | None = None


class EditsForm(ImagesRequest, kw_only=True):
    """The fields of POST /v1/images/edits besides ``image`` and ``mask``."""

    strength: Annotated[float, Meta(gt=0, le=1)] | None = None


class ImageReference(msgspec.Struct):
    """A data URI, or a link to a host that the server's operator has allowed."""

    image_url: str


class VideosRequest(Drawing, kw_only=True):
    """Body of POST /v1/videos; in a form ``input_reference`` is a file."""

    prompt: Annotated[str, Meta(min_length=1, max_length=4096)]
    seconds: Seconds | None = None
    num_frames: Number | None = None
    fps: Annotated[float, Meta(ge=0.1, le=120)] | None = None
    input_reference: ImageReference | None = None


def refuse_unsupported(body: Drawing) -> None:
    """Raises ApiError for a prompt without words, and for a field that asks for what no pipeline can do."""
    if not body.prompt.strip():
        raise ApiError("prompt must hold some text", "prompt", code="invalid_value")
    schemas.refuse_unsupported(body, NEUTRAL)
