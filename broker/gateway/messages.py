"""From a chat's messages to the payload that the pipelines take."""

from __future__ import annotations

from typing import Any

import numpy as np

from adapters.chunk import Payload
from broker.gateway import media
from broker.gateway.errors import ApiError
from broker.gateway.fetch import Fetcher, is_any, is_public
from broker.gateway.models import AUDIO, Model
from broker.gateway.schemas import (
    AudioLinkPart,
    AudioPart,
    ChatMessage,
    ImageLinkPart,
    Part,
    TextPart,
    VideoLinkPart,
)
from broker.gateway.settings import Settings

MAX_CLIPS = 16  #: in one request

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
    if isinstance(part, ImageLinkPart | VideoLinkPart):
        what = "images" if isinstance(part, ImageLinkPart) else "video"
        raise ApiError(f"{field}: {model.name} takes no {what}", field, code="unsupported_modality")
    if AUDIO not in model.inputs:
        raise ApiError(f"{field}: {model.name} takes no audio", field, code="unsupported_modality")
    if len(clips) == MAX_CLIPS:
        raise ApiError(f"{field}: more than {MAX_CLIPS} clips", field, code="too_many_clips")
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
        if ":" not in text:
            raise ApiError(f"{field}: neither a data URI nor a link", field, code="url_not_allowed")
    max_bytes = int(settings.max_audio_mb * 2**20)
    allows = is_any if settings.allow_media_private else is_public
    fetcher = Fetcher(hosts=settings.allow_media_host, max_bytes=max_bytes, allows=allows)
    data = await media.load(text, field, max_bytes, fetcher)
    max_s = settings.max_audio_s - before / media.SAMPLE_RATE
    return await media.decode(data, field, max_s=max_s, expected=expected)
