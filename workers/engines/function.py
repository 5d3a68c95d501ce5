"""Engine ``function``: stages without a model, for trying a pipeline out, for tests and for benchmarks.

    pass      hands its inputs on unchanged
    say       the last user message's text, word by word; a word counts as a token
    tone      a sine tone, one chunk a word of the text it gets
    picture   one colour, drawn from the text; or a given picture, tinted
    film      the same, growing lighter
    sum       a checksum over everything it gets

Each can be told, by a request's parameters, to go wrong: see :mod:`workers.engines.faults`.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from adapters.chunk import Payload
from pipelines.graph import Stage
from pipelines.options import FunctionOptions, options_of
from workers.engine import OUT, ItemError, Job
from workers.engines import function_pictures
from workers.engines.faults import Faults
from workers.engines.function_pictures import PictureParams
from workers.params import checked

_WORD = re.compile(r"\s*\S+(?:\s+$)?")


class SayParams(msgspec.Struct, frozen=True):
    """Parameters of ``say``."""

    max_tokens: Annotated[int, Meta(ge=0)] | None = None  #: words to say at most
    stop: list[str] = []  #: the text ends before the first of these


class ToneParams(msgspec.Struct, frozen=True):
    """Parameters of ``tone``."""

    speed: Annotated[float, Meta(ge=0.25, le=4)] = 1.0  #: words get shorter by this factor


class FunctionEngine:
    """Runs one of the functions. A new attempt counts up to the first payload that is not out yet."""

    resumes = False

    def __init__(self, stage: Stage, *, device: str) -> None:
        self.options = options_of(stage, FunctionOptions)
        self._op = {
            "pass": self._pass,
            "say": self._say,
            "tone": self._tone,
            "picture": self._picture,
            "film": self._film,
            "sum": self._sum,
        }[self.options.op]
        self._bare = self.options.op == "pass" and not self.options.delay_s

    async def start(self) -> None:
        """Nothing to load."""

    async def stop(self) -> None:
        """Nothing to let go."""

    def run(self, job: Job) -> AsyncIterator[Payload]:
        """One job. Raises :class:`ItemError` for parameters and payloads that make no sense."""
        if self._bare and not job.params and len(job.inputs) == 1:
            return next(iter(job.inputs.values()))  # the benchmarks' empty stage: nothing between in and out
        return self._with_faults(job, Faults.of(job))

    async def _with_faults(self, job: Job, faults: Faults) -> AsyncIterator[Payload]:
        number = 0
        async for payload in self._op(job):
            if number < job.emitted:
                yield OUT
            else:
                if self.options.delay_s:
                    await asyncio.sleep(self.options.delay_s)
                yield await faults.strike(job, number, payload)
            number += 1

    async def _pass(self, job: Job) -> AsyncIterator[Payload]:
        """One input after the other, so that every attempt gives the same order."""
        for stream in job.inputs.values():
            async for payload in stream:
                yield payload

    async def _say(self, job: Job) -> AsyncIterator[Payload]:
        params = checked(job.params, SayParams)
        prompt = [payload async for payload in self._pass(job)]
        text = spoken(prompt)
        for stop in params.stop:
            text = text.partition(stop)[0] if stop else text
        read, words = sum(map(count_words, prompt)), _WORD.findall(text)
        limit, room = params.max_tokens, self.options.max_model_len
        if room is not None:
            if read >= room:
                raise ItemError(
                    f"the prompt has {read} tokens, and the model's context of {room} has no room for more",
                    status=400,
                    param="messages",
                )
            limit = room - read if limit is None else min(limit, room - read)
        cut = limit is not None and limit < len(words)
        words = words[:limit]
        end = {
            "finish_reason": "length" if cut else "stop",
            "prompt_tokens": read,
            "completion_tokens": len(words),
        }
        for word in words[:-1]:
            yield {"text": word}
        yield {"text": words[-1] if words else "", **end}

    async def _tone(self, job: Job) -> AsyncIterator[Payload]:
        """Chunks {"audio": float32 [samples], "sample_rate": Hz}; the phase goes on from one to the next."""
        speed = checked(job.params, ToneParams).speed
        rate = self.options.sample_rate
        length = max(round(self.options.word_s * rate / speed), 1)
        number = 0
        async for payload in self._pass(job):
            for _ in text_of(payload).split():
                if number < job.emitted:
                    yield OUT
                else:
                    time = np.arange(number * length, (number + 1) * length) / rate
                    wave = 0.5 * np.sin(2 * np.pi * self.options.frequency_hz * time)
                    yield {"audio": wave.astype(np.float32), "sample_rate": rate}
                number += 1

    async def _picture(self, job: Job) -> AsyncIterator[Payload]:
        """One chunk {"image": uint8 [height, width, 3]}, after the partial ones that are asked for."""
        params, asked, text = await self._asked(job)
        for payload in function_pictures.pictures(asked, text, params, job.seed, self.options.size):
            yield payload

    async def _film(self, job: Job) -> AsyncIterator[Payload]:
        """Two chunks {"frames": uint8 [frames, height, width, 3], "fps"}, and a checkpoint between them."""
        params, asked, text = await self._asked(job)
        first, *rest = function_pictures.film(asked, text, params, job.seed, self.options.size)
        yield first
        await job.checkpoint({"progress": 0.5})
        for payload in rest:
            yield payload

    async def _asked(self, job: Job) -> tuple[PictureParams, list[Payload], str]:
        asked = [payload async for payload in self._pass(job)]
        return checked(job.params, PictureParams), asked, "".join(map(text_of, asked))

    async def _sum(self, job: Job) -> AsyncIterator[Payload]:
        """One chunk {"text": eight hexadecimal digits}; neither edges' nor fields' order matters to it."""
        crc = 0
        for producer in sorted(job.inputs):
            async for payload in job.inputs[producer]:
                crc = checksum(payload, crc)
        yield {"text": f"{crc:08x}"}


def text_of(payload: Payload) -> str:
    """The field ``text``, "" without one. Raises :class:`ItemError` (400) when it is no string."""
    text = payload.get("text", "")
    if not isinstance(text, str):
        raise ItemError(f"text: expected a string, got {type(text).__name__}", status=400, param="text")
    return text


def spoken(payloads: list[Payload]) -> str:
    """What ``say`` says: the last user message's text, else ``prompt``, else ``text``.

    Raises :class:`ItemError` (400) when there is none of them.
    """
    for payload in reversed(payloads):
        for message in reversed(messages_of(payload)):
            if message.get("role") == "user":
                return content_text(message.get("content"))
        for key in ("prompt", "text"):
            if isinstance(payload.get(key), str):
                return str(payload[key])
    raise ItemError("there is no user message to say", status=400, param="messages")


def messages_of(payload: Payload) -> list[dict[str, Any]]:
    """A payload's messages, [] without the field. Raises :class:`ItemError` (400) for what is no list."""
    messages = payload.get("messages") or []
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ItemError("messages: expected a list of objects", status=400, param="messages")
    return messages


def content_text(content: Any) -> str:
    """The text of a message's content, its parts joined by spaces."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | None):
        raise ItemError("content: expected a string or a list of parts", status=400, param="messages")
    parts = [part.get("text") for part in content or [] if isinstance(part, dict)]
    return " ".join(part for part in parts if isinstance(part, str))


def count_words(payload: Payload) -> int:
    """Words in all messages of a payload; without any, in its prompt or text."""
    texts = [content_text(message.get("content")) for message in messages_of(payload)]
    texts = texts or [payload[key] for key in ("prompt", "text") if isinstance(payload.get(key), str)]
    return sum(len(text.split()) for text in texts)


def checksum(value: Any, crc: int = 0) -> int:
    """CRC-32 over a payload or a part of one, with names, types and shapes in it."""
    if isinstance(value, dict):
        for key in sorted(value):
            crc = checksum(value[key], zlib.crc32(key.encode(), crc))
        return crc
    if isinstance(value, list | tuple):
        for item in value:
            crc = checksum(item, crc)
        return zlib.crc32(f"[{len(value)}]".encode(), crc)
    if isinstance(value, np.ndarray):
        crc = zlib.crc32(f"{value.dtype}{value.shape}".encode(), crc)
        return zlib.crc32(np.ascontiguousarray(value).data, crc) if value.size else crc
    return zlib.crc32(repr(value).encode(), crc)
