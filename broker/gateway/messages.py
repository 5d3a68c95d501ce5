"""From a chat's messages to the payload that the pipelines take."""

from __future__ import annotations

import math
from typing import Any

from adapters.chunk import Payload
from broker.gateway import films, media, pictures, uploads
from broker.gateway.errors import ApiError
from broker.gateway.fetch import Fetcher, fetcher
from broker.gateway.media import Samples
from broker.gateway.models import AUDIO, IMAGE, VIDEO, Model
from broker.gateway.pictures import Rgb
from broker.gateway.room import Room
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

_ROLES = {"developer": "system"}  # what models are trained on


async def to_payload(
    messages: list[ChatMessage],
    model: Model,
    settings: Settings,
    *,
    room: Room | None = None,
    sound_in_videos: bool = False,
) -> Payload:
    """Checks the messages and decodes what they carry, in the order given.

    Returns ``{"messages": [{"role", "content"}], "audio": [float32 mono 16 kHz, ...],
    "images": [uint8 [height, width, 3], ...], "videos": [uint8 [frames, height, width, 3], ...],
    "video_fps": [frames a second of each, ...]}``, the latter four only where there are some. Their places in
    a message are parts like ``{"type": "audio", "index": i}``; with ``sound_in_videos`` a video's part also
    says which of the clips is its own sound: ``{"type": "video", "index": i, "audio": j}``.

    Raises ApiError that names the message and the part, and one (503) where there is no ``room``.
    """
    if not messages:
        raise ApiError("messages must not be empty", "messages")
    reader = _Reader(model, settings, room or Room(math.inf), sound_in_videos)
    turns: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        field = f"messages[{number}].content"
        content = message.content
        if not content:
            raise ApiError(f"{field} must not be empty", field)
        if not isinstance(content, str):
            content = _joined([await reader.part(part, f"{field}[{i}]") for i, part in enumerate(content)])
        turns.append({"role": _ROLES.get(message.role, message.role), "content": content})
    return {"messages": turns, **reader.media()}


def _joined(parts: list[dict[str, Any]]) -> Any:
    """Text alone is one string, as models' chat templates take it."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


class _Reader:
    """Decodes the parts of one request, and knows what is left of its allowances."""

    def __init__(self, model: Model, settings: Settings, room: Room, sound_in_videos: bool) -> None:
        self._model = model
        self._settings = settings
        self._room = room
        self._sound_in_videos = sound_in_videos
        self._pixels = uploads.Pixels(settings.max_pixels_mp)
        self._clips: list[Samples] = []
        self._pictures: list[Rgb] = []
        self._films: list[Rgb] = []
        self._fps: list[float] = []

    def media(self) -> Payload:
        """The payload's fields of all that was decoded."""
        fields = {
            "audio": self._clips,
            "images": self._pictures,
            "videos": self._films,
            "video_fps": self._fps,
        }
        return {name: values for name, values in fields.items() if values}

    async def part(self, part: Part, field: str) -> dict[str, Any]:
        """One part of a message. Raises ApiError."""
        if isinstance(part, TextPart):
            return {"type": "text", "text": part.text}
        if isinstance(part, ImageLinkPart):
            return await self._picture(part, field)
        if isinstance(part, VideoLinkPart):
            return await self._film(part, field)
        self._check(AUDIO, "audio", len(self._clips), self._settings.max_clips, field)
        self._clips.append(await self._clip(part, field))
        return {"type": "audio", "index": len(self._clips) - 1}

    def _check(self, modality: str, plural: str, before: int, most: int, field: str) -> None:
        """Whether the pipeline takes such a part, and this request one more."""
        if modality not in self._model.inputs:
            raise ApiError(
                f"{field}: {self._model.name} takes no {plural}", field, code="unsupported_modality"
            )
        if before == most:
            what = "clips" if modality == AUDIO else plural
            raise ApiError(f"{field}: more than {most} {what}", field, code=f"too_many_{what}")

    @property
    def _seconds_left(self) -> float:
        heard = sum(map(len, self._clips)) / media.SAMPLE_RATE
        return self._settings.max_audio_s - heard

    async def _clip(self, part: AudioPart | AudioLinkPart, field: str) -> Samples:
        expected = None
        if isinstance(part, AudioPart):
            text, field = part.input_audio.data, f"{field}.input_audio"
            expected = part.input_audio.format
            if expected not in media.FORMATS:
                raise ApiError(f"{field}.format: one of {', '.join(media.FORMATS)}", f"{field}.format")
            field = f"{field}.data"
            data = await uploads.load(text, field, self._fetcher(AUDIO, self._settings.max_audio_mb))
        else:
            field = f"{field}.audio_url.url"
            data = await self._linked(part.audio_url.url, field, AUDIO, self._settings.max_audio_mb)
        samples = await media.decode(data, field, max_s=self._seconds_left, expected=expected)
        self._room.hold(samples)
        return samples

    async def _picture(self, part: ImageLinkPart, field: str) -> dict[str, Any]:
        self._check(IMAGE, "images", len(self._pictures), self._settings.max_images, field)
        link, field = part.image_url, f"{field}.image_url.url"
        data = await self._linked(link.url, field, IMAGE, self._settings.max_image_mb)
        low = link.detail == "low"
        rgb = await pictures.decode(data, field, max_mp=self._settings.max_image_mp, low=low)
        self._pixels.take(rgb.shape[0] * rgb.shape[1], field)
        self._room.hold(rgb)
        self._pictures.append(rgb)
        return {"type": "image", "index": len(self._pictures) - 1}

    async def _film(self, part: VideoLinkPart, field: str) -> dict[str, Any]:
        settings = self._settings
        self._check(VIDEO, "videos", len(self._films), settings.max_videos, field)
        if self._sound_in_videos:
            self._check(AUDIO, "audio", len(self._clips), settings.max_clips, field)
        field = f"{field}.video_url.url"
        data = await self._linked(part.video_url.url, field, VIDEO, settings.max_video_mb)
        film = await films.decode(
            data,
            field,
            films.bounds(settings),
            pixels=self._pixels,
            sound_s=self._seconds_left if self._sound_in_videos else None,
        )
        self._room.hold(film.frames)
        self._films.append(film.frames)
        self._fps.append(film.fps)
        place = {"type": "video", "index": len(self._films) - 1}
        if film.sound is not None:
            self._room.hold(film.sound)
            self._clips.append(film.sound)
            place["audio"] = len(self._clips) - 1
        return place

    async def _linked(self, url: str, field: str, what: str, max_mb: float) -> bytes:
        if ":" not in url:
            raise ApiError(f"{field}: neither a data URI nor a link", field, code="url_not_allowed")
        return await uploads.load(url, field, self._fetcher(what, max_mb))

    def _fetcher(self, what: str, max_mb: float) -> Fetcher:
        return fetcher(self._settings, what, max_mb)
