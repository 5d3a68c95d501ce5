"""How much an answer took.

Text is counted in the language model's tokens. Speech has no tokens of its own here, so it is counted as
OpenAI's realtime models do: a token is 100 ms of what the caller said, or 50 ms of what was spoken to them.
Pictures are counted by their area.
"""

from __future__ import annotations

import math

import msgspec
from msgspec import UNSET, UnsetType

HEARD_S = 0.1  #: seconds of input audio per token
SPOKEN_S = 0.05  #: seconds of output audio per token
PATCH = 32  #: pixels; a picture has a token for each square of this edge that it touches


class TokenDetails(msgspec.Struct):
    """The parts of a sum of tokens."""

    text_tokens: int
    audio_tokens: int
    image_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    """The `usage` of a chat. Both sums hold their details, each once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails
    completion_tokens_details: TokenDetails


def heard_tokens(seconds: float) -> int:
    """Tokens of input audio."""
    return math.ceil(round(seconds / HEARD_S, 6))


def spoken_tokens(seconds: float) -> int:
    """Tokens of output audio."""
    return math.ceil(round(seconds / SPOKEN_S, 6))


def seen_tokens(width: int, height: int) -> int:
    """Tokens of a picture."""
    return math.ceil(width / PATCH) * math.ceil(height / PATCH)


def prompt_details(tokens: int, counted: dict[str, int] | None, heard: int) -> TokenDetails:
    """The parts of a prompt.

    Args:
        tokens: The text stage's count.
        counted: Its parts as that stage counts them (``audio_tokens``, ...), where its model hears and sees;
            what they leave is text. None: it reads text alone, which another stage may have heard.
        heard: What :func:`heard_tokens` makes of the request's audio, for that case.
    """
    if counted is None:
        return TokenDetails(tokens, heard)
    parts = {
        name: counted[f"{name}_tokens"] for name in ("audio", "image", "video") if f"{name}_tokens" in counted
    }
    return TokenDetails(
        tokens - sum(parts.values()),
        parts.get("audio", 0),
        parts.get("image", UNSET),
        parts.get("video", UNSET),
    )


def chat_usage(prompt: TokenDetails, text: int, audio: int, image: int | UnsetType = UNSET) -> Usage:
    """From the counts to the object; ``image``: where pictures are wanted."""
    asked = sum(value for value in msgspec.structs.astuple(prompt) if value is not UNSET)
    answered = text + audio + (0 if image is UNSET else image)
    return Usage(asked, answered, asked + answered, prompt, TokenDetails(text, audio, image))


class PictureDetails(msgspec.Struct):
    """The parts of a sum of tokens."""

    text_tokens: int
    image_tokens: int


class PictureUsage(msgspec.Struct):
    """The `usage` of pictures."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: PictureDetails
    output_tokens_details: PictureDetails


def picture_usage(text: int, seen: int, drawn: int) -> PictureUsage:
    """From the counts to the object: the text, in characters, and the tokens of pictures in and out."""
    asked = text + seen
    return PictureUsage(asked, drawn, asked + drawn, PictureDetails(text, seen), PictureDetails(0, drawn))
