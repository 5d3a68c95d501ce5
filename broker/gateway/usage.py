"""How much an answer took.

Text is counted in the language model's tokens. Speech has no tokens of its own here, so it is counted as
OpenAI's realtime models do: a token is 100 ms of what the caller said, or 50 ms of what was spoken to them.
"""

from __future__ import annotations

import math

import msgspec

HEARD_S = 0.1  #: seconds of input audio per token
SPOKEN_S = 0.05  #: seconds of output audio per token


class TokenDetails(msgspec.Struct):
    """The parts of a sum of tokens."""

    text_tokens: int
    audio_tokens: int


class Usage(msgspec.Struct):
    """The `usage` of a chat. Both sums hold their details' text and audio tokens, each once."""

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


def chat_usage(prompt_text: int, prompt_audio: int, text: int, audio: int) -> Usage:
    """From the four counts to the object."""
    prompt, completion = prompt_text + prompt_audio, text + audio
    return Usage(
        prompt,
        completion,
        prompt + completion,
        TokenDetails(prompt_text, prompt_audio),
        TokenDetails(text, audio),
    )
