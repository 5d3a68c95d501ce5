"""One choice of a chat's answer while it grows: its text, its speech, and what is counted of it."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from msgspec import UNSET

from adapters.chunk import Payload
from broker.gateway import audio, prints, usage
from broker.gateway.completion import ImagePart, Link
from broker.gateway.errors import ApiError
from broker.gateway.metrics import Watch
from broker.gateway.models import TEXT
from broker.gateway.plan import ChatPlan
from broker.gateway.usage import Usage, chat_usage, prompt_details

FALLBACK_RATE = 24_000  #: Hz in the header of a WAV without any sample
PIECE_BYTES = 32_766  #: of audio in one event: base64 makes 44 KB of it; a multiple of 6, see Base64Pieces


class Speech:
    """Audio payloads to encoded bytes. The encoder is made with the first payload, which tells the rate."""

    def __init__(self, format_: str, *, whole: bool) -> None:
        self.format = format_
        self.samples = 0
        self.sample_rate = 0
        self._whole = whole
        self._encoder: audio.Encoder | None = None

    @property
    def seconds(self) -> float:
        """How long the speech is so far."""
        return self.samples / self.sample_rate if self.sample_rate else 0.0

    async def feed(self, payload: Payload) -> bytes:
        """Encodes ``{"audio": float32 [samples], "sample_rate": Hz}``."""
        samples, rate = np.ravel(payload["audio"]), int(payload["sample_rate"])
        if self._encoder is None:
            self.sample_rate = rate
            self._encoder = audio.encoder(self.format, rate, whole=self._whole)
        if rate != self.sample_rate:
            raise ApiError(f"the speech's rate changed from {self.sample_rate} to {rate} Hz", status=500)
        self.samples += len(samples)
        return await self._encoder.feed(samples)

    async def finish(self) -> bytes:
        """The last bytes; a WAV without a sample still is a valid WAV."""
        if self._encoder is not None:
            return await self._encoder.finish()
        return audio.wav_header(FALLBACK_RATE, 0) if self.format == "wav" else b""


class Answer:
    """Takes one request's outputs in order.

    Args:
        speech: Absent: no audio is wanted.
        watch: Told of the first text and the first audio.
    """

    def __init__(self, speech: Speech | None, watch: Watch) -> None:
        self.speech = speech
        self.finish_reason = "stop"
        self.prompt_tokens = 0
        self.prompt_parts: dict[str, int] | None = None  #: of `prompt_tokens`, where the stage counts them
        self.text_tokens = 0
        self.image_tokens = 0
        self._watch = watch

    async def take(self, output: str, payload: Payload) -> tuple[str, bytes]:
        """More of the answer: its new text, and new bytes of encoded speech."""
        if output == TEXT:
            return self._take_text(payload), b""
        if self.speech is None:
            return "", b""
        self._watch.first_audio()
        return "", await self.speech.feed(payload)

    def _take_text(self, payload: Payload) -> str:
        text: str = payload.get("text", "")
        if text:
            self._watch.first_text()
        ids: list[Any] | None = payload.get("token_ids")
        self.text_tokens += bool(text) if ids is None else len(ids)
        if "finish_reason" in payload:
            self.finish_reason = payload["finish_reason"]
            self.prompt_tokens = payload.get("prompt_tokens", 0)
            self.prompt_parts = payload.get("prompt_tokens_details")
            self.text_tokens = payload.get("completion_tokens", self.text_tokens)
        return text

    async def finish(self) -> bytes:
        """The last bytes of the speech."""
        return b"" if self.speech is None else await self.speech.finish()

    async def draw(self, payload: Payload) -> list[ImagePart]:
        """The picture, as the content that shows it; nothing for one that is not finished yet."""
        if payload.get("partial") is not None:
            return []
        self._watch.first_image()
        picture = await prints.picture(payload, "png", 100)
        self.image_tokens += usage.seen_tokens(picture.width, picture.height)
        return [ImagePart(Link(f"data:image/png;base64,{picture.data}"))]

    def check(self, plan: ChatPlan) -> None:
        """At the end. Raises ApiError (500) where a picture was to come and none did."""
        if plan.draws and not self.image_tokens:
            raise ApiError("the pipeline gave no picture", status=500, code="bad_output")

    @property
    def audio_tokens(self) -> int:
        """Tokens of the speech so far."""
        return usage.spoken_tokens(self.speech.seconds) if self.speech else 0


def new_answer(plan: ChatPlan, watch: Watch, *, whole: bool) -> Answer:
    """A fresh, empty choice of a chat; ``whole``: it is sent when it is complete."""
    return Answer(Speech(plan.audio_format, whole=whole) if plan.speaks else None, watch)


def usage_of(plan: ChatPlan, answers: list[Answer]) -> Usage:
    """The sum over all choices; the prompt counts once."""
    asked = max(answers, key=lambda answer: answer.prompt_tokens)
    return chat_usage(
        prompt_details(asked.prompt_tokens, asked.prompt_parts, plan.heard_tokens),
        sum(answer.text_tokens for answer in answers),
        sum(answer.audio_tokens for answer in answers),
        sum(answer.image_tokens for answer in answers) if plan.draws else UNSET,
    )


def count_finished(watch: Watch, answers: list[Answer]) -> None:
    """Counts a complete answer."""
    watch.done(sum(answer.speech.seconds for answer in answers if answer.speech))


class Base64Pieces:
    """Cuts bytes into small base64 texts that a client may decode one by one or joined.

    Every piece but the last holds a multiple of 6 bytes: so it has no padding, and no 16 bit sample is split.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """All whole pieces that there are now."""
        data = self._rest + data
        end = len(data) // 6 * 6
        self._rest = data[end:]
        return _cut(data[:end])

    def finish(self) -> list[str]:
        """What is left."""
        rest, self._rest = self._rest, b""
        return _cut(rest)


def _cut(data: bytes) -> list[str]:
    return [
        base64.b64encode(data[start : start + PIECE_BYTES]).decode("ascii")
        for start in range(0, len(data), PIECE_BYTES)
    ]
