"""From a request body's fields to each stage's parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from broker.gateway.errors import ApiError, from_decoding
from broker.gateway.models import TEXT, Model
from broker.gateway.schemas import ChatRequest, Sampling

StageParams = dict[str, dict[str, Any]]


def from_list(model: Model, entries: list[dict[str, Any] | None] | None) -> StageParams:
    """The parameters of a `sampling_params_list`; those that are known are checked like top-level fields."""
    params = model.stage_params(entries)
    for number, entry in enumerate(entries or []):
        if entry:
            field = f"sampling_params_list[{number}]"
            try:
                msgspec.convert(entry, Sampling)
                msgspec.msgpack.encode(entry)
            except msgspec.ValidationError as error:
                raise from_decoding(error, field) from None
            except OverflowError:  # JSON has no bounds
                raise ApiError(
                    f"{field} holds a whole number of more than 64 bits", field, code="invalid_value"
                ) from None
    for values in params.values():
        if isinstance(values.get("stop"), str):  # as at the top, and as vLLM takes it
            values["stop"] = [values["stop"]]
    return params


def for_text(body: ChatRequest) -> dict[str, Any]:
    """The text stage's parameters, as far as the caller set any."""
    params: dict[str, Any] = {}
    for name in Sampling.__struct_fields__:
        value = getattr(body, name)
        if value is not None:
            params[name] = value
    if body.max_completion_tokens is not None:
        params["max_tokens"] = body.max_completion_tokens
    if isinstance(body.stop, str):
        params["stop"] = [body.stop]
    return params


def for_chat(model: Model, body: ChatRequest) -> StageParams:
    """All stages' parameters of a chat, less the voice."""
    params = from_list(model, body.sampling_params_list)
    top = for_text(body)
    if top and TEXT in model.pipeline.outputs:
        stage = model.pipeline.outputs[TEXT]
        params[stage] = top | params.get(stage, {})
    return params


def add_speech(model: Model, params: StageParams, voice: str | None, speed: float | None) -> None:
    """Adds the voice and the speed to the stages that speak."""
    spoken: dict[str, Any] = {}
    if voice is not None:
        spoken["voice"] = voice
    if speed is not None and speed != 1.0:
        spoken["speed"] = speed
    if spoken:
        for stage in model.speakers:
            params[stage] = spoken | params.get(stage, {})
