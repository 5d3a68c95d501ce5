"""The chat objects that go out. ``UNSET`` fields are left out, ``None`` is JSON's null."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from broker.gateway.usage import Usage


class AudioDelta(msgspec.Struct, kw_only=True):
    """A piece of the speech: its id comes first, its expiry last and alone."""

    id: str | UnsetType = UNSET
    data: str | UnsetType = UNSET
    transcript: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET


class Link(msgspec.Struct):
    """A data URI."""

    url: str


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """The words of an answer that holds a picture too."""

    text: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """The picture of an answer."""

    image_url: Link


Part = TextPart | ImagePart


class Delta(msgspec.Struct, kw_only=True):
    """What is new in a choice."""

    role: str | UnsetType = UNSET
    content: str | list[Part] | UnsetType = UNSET
    audio: AudioDelta | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """One choice of a chunk."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: None = None


class Chunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat. ``modality``: what kind of output the chunk carries."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    modality: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: dict[str, Any] | UnsetType = UNSET


class Audio(msgspec.Struct):
    """The speech of a whole answer."""

    id: str
    data: str
    expires_at: int
    transcript: str


class Message(msgspec.Struct, kw_only=True):
    """A whole answer."""

    role: Literal["assistant"] = "assistant"
    content: str | list[Part] | None
    refusal: None = None
    audio: Audio | UnsetType = UNSET


class Choice(msgspec.Struct, kw_only=True):
    """One whole choice."""

    index: int
    message: Message
    finish_reason: str
    logprobs: None = None


class Completion(msgspec.Struct, kw_only=True):
    """Body of an unstreamed chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    metrics: dict[str, Any] | UnsetType = UNSET


encode = msgspec.json.Encoder().encode
