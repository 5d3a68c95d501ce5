"""How a picture or a film is to be made: checked against the pipeline's bounds, before anything is queued.

The bounds are fields of :class:`pipelines.graph.Endpoint`. All stages get the same parameters, and each takes
those that are its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from adapters.chunk import Payload
from broker.gateway.errors import ApiError, from_decoding
from broker.gateway.models import Model
from broker.gateway.params import StageParams, from_list
from broker.gateway.picture_schemas import Drawing, EditsForm, ImagesRequest, VideosRequest
from broker.gateway.schemas import ChatMessage, ChatRequest, Number, TextPart
from pipelines.graph import Endpoint

AUTO = "auto"

#: Of guidance; the latter two some families have besides.
_SCALES = ("guidance_scale", "true_cfg_scale", "guidance_scale_2")
_STEPS = ("num_inference_steps", "guidance_scale", "true_cfg_scale", "size", "negative_prompt")

_SIZE = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")


class _Entry(msgspec.Struct):
    """What an entry of `sampling_params_list` may say of pictures: no way around the bounds."""

    width: Number | None = None
    height: Number | None = None
    num_inference_steps: Number | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    guidance_scale_2: float | None = None
    partial_images: Number | None = None
    num_frames: Number | None = None
    fps: float | None = None
    strength: float | None = None


def steps(body: Drawing | ChatRequest, endpoint: Endpoint) -> dict[str, Any]:
    """The parameters of a body, less those that are None: the family's own defaults hold for these.

    Raises ApiError (400) that names the field and the bound.
    """
    params: dict[str, Any] = {}
    if (size := size_of(body.size, endpoint)) is not None:
        params["width"], params["height"] = size
    _within("num_inference_steps", body.num_inference_steps, 1, endpoint.max_steps)
    params["num_inference_steps"] = body.num_inference_steps
    for name in _SCALES:
        params[name] = getattr(body, name, None)
        _within(name, params[name], 0, endpoint.max_guidance)
    return {name: value for name, value in params.items() if value is not None}


def pictures(body: ImagesRequest, endpoint: Endpoint, most: int) -> dict[str, Any]:
    """The same for pictures; ``most``: how many the gateway allows."""
    params = steps(body, endpoint)
    _within("n", body.n, 1, min(endpoint.max_n, most))
    _within("partial_images", body.partial_images, 0, endpoint.max_partial_images)
    if body.partial_images:
        if not body.stream:
            raise ApiError("partial_images needs stream: true", "partial_images", code="invalid_value")
        params["partial_images"] = body.partial_images
    if isinstance(body, EditsForm) and body.strength is not None:
        params["strength"] = body.strength
    return params


def film(body: VideosRequest, endpoint: Endpoint) -> dict[str, Any]:
    """The same for a film. ``seconds`` become frames: the nearest number that the model can make."""
    params = steps(body, endpoint)
    if body.fps is not None:
        params["fps"] = body.fps
    frames = body.num_frames
    if frames is not None and body.seconds is not None:
        raise _invalid("num_frames", "this or seconds, not both")
    if body.seconds is not None:
        seconds, fps = float(body.seconds), params.setdefault("fps", endpoint.fps)
        frames = round(seconds * fps / endpoint.frame_step) * endpoint.frame_step + 1
        if not seconds or frames > endpoint.max_frames:
            problem = f"{seconds:g} s at {fps:g} frames a second; from 1 to {endpoint.max_frames} frames"
            raise _invalid("seconds", problem)
    _within("num_frames", frames, 1, endpoint.max_frames)
    if frames is not None:
        if (frames - 1) % endpoint.frame_step:
            raise _invalid("num_frames", f"a multiple of {endpoint.frame_step} and one more, not {frames}")
        params["num_frames"] = frames
    return params


def for_stages(
    model: Model, endpoint: Endpoint, params: dict[str, Any], entries: list[dict[str, Any] | None] | None
) -> StageParams:
    """Each stage's parameters: those of the body, and what a `sampling_params_list` says besides.

    Raises ApiError (400) for an entry over the bounds.
    """
    listed = from_list(model, entries)
    for number, entry in enumerate(entries or []):
        check_entry(entry or {}, endpoint, f"sampling_params_list[{number}]")
    both = {stage: params | listed.get(stage, {}) for stage in model.order}
    return {stage: values for stage, values in both.items() if values}


def for_chat(model: Model, params: StageParams, body: ChatRequest, *, draws: bool) -> StageParams:
    """A chat's parameters with those of its picture, within the bounds of the pipeline's `images` endpoint.

    Raises ApiError (400) also for a field about pictures where none is wanted.
    """
    endpoint = model.pipeline.endpoints.get("images", Endpoint())
    if draws:
        for number, entry in enumerate(body.sampling_params_list or []):
            check_entry(entry or {}, endpoint, f"sampling_params_list[{number}]")
    if not draws:
        for field in _STEPS:
            if getattr(body, field) is not None:
                raise ApiError(f"{field} needs modalities with image", field, code="unsupported_parameter")
        return params
    common = steps(body, endpoint)
    both = {stage: common | params.get(stage, {}) for stage in model.order}
    return {stage: values for stage, values in both.items() if values}


def asked(messages: Sequence[ChatMessage], negative_prompt: str | None) -> Payload:
    """What a chat's payload says besides, for stages that know no conversation: the last user message's text.

    Raises ApiError (400) where there is none.
    """
    last = next((m.content for m in reversed(messages) if m.role == "user"), None)
    parts = last if isinstance(last, list) else []
    text = last if isinstance(last, str) else "\n".join(p.text for p in parts if isinstance(p, TextPart))
    if not text.strip():
        raise ApiError("messages: no user message says what to draw", "messages", code="invalid_value")
    payload: Payload = {"prompt": text}
    if negative_prompt is not None:
        payload["negative_prompt"] = negative_prompt
    return payload


def check_entry(entry: dict[str, Any], endpoint: Endpoint, prefix: str) -> None:
    """Raises ApiError (400) for parameters over the bounds; ``prefix``: their place in the request."""
    try:
        asked = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        raise from_decoding(error, prefix) from None
    for name in ("width", "height"):
        if (edge := getattr(asked, name)) is not None:
            _check_edge(f"{prefix}.{name}", edge, endpoint)
    if asked.width is not None and asked.height is not None:
        _check_pixels(f"{prefix}.width", asked.width, asked.height, endpoint)
    bounds = {
        "num_inference_steps": (1, endpoint.max_steps),
        **dict.fromkeys(_SCALES, (0, endpoint.max_guidance)),
        "partial_images": (0, endpoint.max_partial_images),
        "num_frames": (1, endpoint.max_frames),
        "fps": (0.1, 120),
        "strength": (0, 1),
    }
    for name, (low, high) in bounds.items():
        _within(f"{prefix}.{name}", getattr(asked, name), low, high)


def size_of(text: str | None, endpoint: Endpoint) -> tuple[int, int] | None:
    """(width, height) of a `size`; None: as the model has it. Raises ApiError (400)."""
    if text is None or text == AUTO:
        return None
    match = _SIZE.fullmatch(text)
    if match is None:
        raise _invalid("size", f"{AUTO}, or WIDTHxHEIGHT in pixels, not {text[:40]!r}")
    width, height = int(match[1]), int(match[2])
    for edge in (width, height):
        _check_edge("size", edge, endpoint)
    _check_pixels("size", width, height, endpoint)
    return width, height


def _check_edge(field: str, edge: int, endpoint: Endpoint) -> None:
    if not 1 <= edge <= endpoint.max_edge:
        raise _invalid(field, f"{edge} pixels; width and height are from 1 to {endpoint.max_edge}")
    if edge % endpoint.multiple_of:
        raise _invalid(field, f"{edge} pixels; width and height are multiples of {endpoint.multiple_of} here")


def _check_pixels(field: str, width: int, height: int, endpoint: Endpoint) -> None:
    if width * height > endpoint.max_pixels:
        raise _invalid(field, f"{width} x {height} pixels; at most {endpoint.max_pixels} in all")


def _within(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # also NaN, which forms can say
        raise _invalid(field, f"{value}; from {low:g} to {high:g}")


def _invalid(field: str, problem: str) -> ApiError:
    return ApiError(f"{field}: {problem}", field, code="invalid_value")
