"""From a chat's messages to the payload that the pipelines take."""

from __future__ import annotations

from typing import Any

import numpy as np

from adapters.chunk import Payload
from broker.gateway import media
from broker.gateway.errors import ApiError
from broker.gateway.models import AUDIO, Model
from broker.gateway.schemas import (
    AudioLinkPart,
    AudioPart,
    ChatMessage,
    ImageLinkPart,
    Part,
    TextPart,
)
from broker.gateway.settings import Settings

_ROLES = {"developer": "system"}  # what models are trained on


async def to_payload(messages: list[ChatMessage], model: Model, settings: Settings) -> Payload:
    """Checks the messages and decodes their audio.

    Returns ``{"messages": [{"role", "content"}], "audio": [float32 mono 16 kHz, ...]}``, "audio" only with
    clips; a clip's place in a message is ``{"type": "audio", "index": i}``.

    Raises ApiError that names the message and the part.
    """
    if not messages:
        raise ApiError("messages must not be empty", "messages")
    clips: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    turns: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        field = f"messages[{number}].content"
        content = message.content
        if not content:
            raise ApiError(f"{field} must not be empty", field)
        if not isinstance(content, str):
            parts = [
                await _part(part, f"{field}[{i}]", model, settings, clips) for i, part in enumerate(content)
            ]
            content = _joined(parts)
        turns.append({"role": _ROLES.get(message.role, message.role), "content": content})
    payload: Payload = {"messages": turns}
    if clips:
        payload["audio"] = clips
    return payload


def _joined(parts: list[dict[str, Any]]) -> Any:
    """Text alone is one string, as models' chat templates take it."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


async def _part(part: Part, field: str, model: Model, settings: Settings, clips: list[Any]) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImageLinkPart):
        raise ApiError(f"{field}: {model.name} takes no images", field, code="unsupported_modality")
    if AUDIO not in model.inputs:
        raise ApiError(f"{field}: {model.name} takes no audio", field, code="unsupported_modality")
    samples = await _audio(part, field, settings, sum(len(clip) for clip in clips))
    clips.append(samples)
    return {"type": "audio", "index": len(clips) - 1}


async def _audio(part: AudioPart | AudioLinkPart, field: str, settings: Settings, before: int) -> Any:
    """Decodes one clip; ``before`` samples of the request's allowance are spent already."""
    expected = None
    if isinstance(part, AudioPart):
        text, field = part.input_audio.data, f"{field}.input_audio"
        expected = part.input_audio.format
        if expected not in media.FORMATS:
            raise ApiError(f"{field}.format: one of {', '.join(media.FORMATS)}", f"{field}.format")
        field = f"{field}.data"
    else:
        text, field = part.audio_url.url, f"{field}.audio_url.url"
        if not text.startswith("data:"):
            raise ApiError(f"{field}: links are not fetched; send a data URI", field, code="url_not_allowed")
    data = media.from_base64(text, field, int(settings.max_audio_mb * 2**20))
    max_s = settings.max_audio_s - before / media.SAMPLE_RATE
    return await media.decode(data, field, max_s=max_s, expected=expected)
