"""One exchange with a pipeline: what is asked, as the broker takes it, and the answer as typed events.

What the HTTP gateway does for its callers, this does for the Python API and the command line.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from adapters.chunk import Payload
from broker.attached import Attached, CannotDo, Clip, Messages
from broker.client import Client, RequestStream
from broker.pixels import Rgb
from broker.protocol import Timing
from pipelines.graph import Endpoint, Pipeline

Samples = npt.NDArray[np.float32]
Params = dict[str, dict[str, Any]]

TEXT, AUDIO, TRANSCRIPT, IMAGE = "text", "audio", "transcript", "image"
NOTHING = Attached()


@dataclass(frozen=True, slots=True)
class Question:
    """Arguments of :meth:`broker.client.Client.submit`; the seed is always known."""

    pipeline: str
    outputs: list[str]
    given: dict[str, list[Payload]]
    params: Params
    has: list[str]
    seed: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer took; tokens are the text stage's, None where it does not count them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    audio_s: float = 0.0  #: length of the speech


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer."""

    text: str
    audio: Samples | None  #: mono float32 in [-1, 1]; None without any speech
    sample_rate: int | None  #: Hz of `audio`
    timings: list[Timing]  #: each stage's, in seconds since the broker accepted the request
    usage: Usage
    finish_reason: str  #: "stop", or "length" when max_tokens cut the text
    seed: int  #: gives the same answer again
    outputs: dict[str, list[Payload]] = field(default_factory=dict)  #: payloads of all other outputs

    def with_text(self, text: str) -> Result:
        """The same with another text."""
        return replace(self, text=text)


@dataclass(frozen=True, slots=True)
class TextEvent:
    """More text."""

    text: str


@dataclass(frozen=True, slots=True)
class AudioEvent:
    """More speech: mono float32 in [-1, 1], and its rate in Hz."""

    audio: Samples
    sample_rate: int


@dataclass(frozen=True, slots=True)
class OutputEvent:
    """A payload of any other output ("image", "transcript", ...)."""

    output: str
    payload: Payload


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The end: everything once more, joined."""

    result: Result


Event = TextEvent | AudioEvent | OutputEvent | DoneEvent


async def submit(client: Client, question: Question) -> RequestStream:
    """Asks. Raises :class:`broker.client.BrokerError` when the request is refused."""
    return await client.submit(
        question.pipeline,
        outputs=question.outputs,
        given=question.given,
        params=question.params,
        has=question.has,
        seed=question.seed,
    )


async def exchange(client: Client, question: Question) -> AsyncGenerator[Event, None]:
    """Asks, and yields the answer as it comes; the last event is a :class:`DoneEvent`.

    Leaving the iteration early aborts the request. Arrays are the receiver's own copies.
    Raises :class:`broker.client.BrokerError` when the request is refused or fails.
    """
    answer = _Answer()
    stream = await submit(client, question)
    async with stream:
        async for output, payload in stream:
            event = answer.take(output, payload)
            if event is not None:
                yield event
        yield DoneEvent(answer.result(stream.timings, question.seed))


class _Answer:
    """Gathers a result."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._audio: list[Samples] = []
        self._sample_rate: int | None = None
        self._tokens: tuple[int | None, int | None] = (None, None)
        self._finish_reason = "stop"
        self._others: dict[str, list[Payload]] = {}

    def take(self, output: str, payload: Payload) -> Event | None:
        if output == TEXT:
            return self._take_text(payload)
        if output == AUDIO:
            samples = np.array(payload["audio"], np.float32).ravel()
            self._sample_rate = int(payload["sample_rate"])
            self._audio.append(samples)
            return AudioEvent(samples, self._sample_rate)
        own = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in payload.items()}
        self._others.setdefault(output, []).append(own)
        return OutputEvent(output, own)

    def _take_text(self, payload: Payload) -> TextEvent | None:
        if "finish_reason" in payload:
            self._finish_reason = payload["finish_reason"]
            self._tokens = payload.get("prompt_tokens"), payload.get("completion_tokens")
        text: str = payload.get("text", "")
        if not text:
            return None
        self._texts.append(text)
        return TextEvent(text)

    def result(self, timings: list[Timing], seed: int) -> Result:
        audio = np.concatenate(self._audio) if self._audio else None
        seconds = len(audio) / self._sample_rate if audio is not None and self._sample_rate else 0.0
        return Result(
            text="".join(self._texts),
            audio=audio,
            sample_rate=self._sample_rate,
            timings=timings,
            usage=Usage(*self._tokens, seconds),
            finish_reason=self._finish_reason,
            seed=seed,
            outputs=self._others,
        )


# --- questions


def chat(
    pipeline: Pipeline,
    prompt: str | Messages,
    modalities: Sequence[str] | None = None,
    *,
    attached: Attached = NOTHING,
    sampling: dict[str, Any] | None = None,
    params: Params | None = None,
    voice: dict[str, Any] | None = None,
    seed: int | None = None,
) -> Question:
    """A conversation's next turn.

    Args:
        pipeline: Who is asked.
        prompt: The user's words, or a conversation in OpenAI's form.
        modalities: Outputs that are wanted; None: all that the pipeline's chat endpoint offers.
        attached: What comes along.
        sampling: Parameters for the stage that makes the text.
        params: Parameters per stage, which win over `sampling` and `voice`.
        voice: Parameters for the stages that only speech needs.
        seed: Drawn if absent.

    Raises CannotDo for what the pipeline can't do.
    """
    endpoint = _endpoint(pipeline, "chat")
    outputs = list(endpoint.outputs if modalities is None else modalities)
    _check_outputs(pipeline, outputs)
    has = attached.has(pipeline)
    payload: Payload = {"messages": attached.place(prompt), **attached.fields()}
    if IMAGE in outputs:  # for stages that know no conversation
        payload["prompt"] = _last_words(payload["messages"])
    ours: Params = {}
    if sampling and TEXT in pipeline.outputs:
        ours[pipeline.outputs[TEXT]] = dict(sampling)
    if voice:
        ours |= {stage: dict(voice) for stage in _speakers(pipeline)}
    return Question(
        pipeline.name,
        outputs,
        {endpoint.input: [payload]},
        _merged(ours, params),
        has,
        _seed(seed),
    )


def _last_words(messages: Messages) -> str:
    """The last user message's text. Raises CannotDo where there is none."""
    content = next((m.get("content") for m in reversed(messages) if m.get("role") == "user"), None)
    parts = content if isinstance(content, list) else [{"text": content}]
    words = "\n".join(text for part in parts if isinstance(text := part.get("text"), str))
    if not words.strip():
        raise CannotDo("no user message says what to draw")
    return words


def speech(
    pipeline: Pipeline, text: str, *, voice: dict[str, Any], params: Params | None, seed: int | None
) -> Question:
    """Text to be spoken as it is. Raises CannotDo for a pipeline that can't."""
    endpoint = _endpoint(pipeline, "speech")
    ours: Params = {stage: dict(voice) for stage in _speakers(pipeline)} if voice else {}
    given = {endpoint.input: [{"text": text}]}
    return Question(pipeline.name, [AUDIO], given, _merged(ours, params), [], _seed(seed))


def transcription(
    pipeline: Pipeline, clip: Clip, *, options: dict[str, Any], params: Params | None
) -> Question:
    """Speech to be written down. Raises CannotDo for a pipeline that can't."""
    endpoint = _endpoint(pipeline, "transcriptions")
    output = endpoint.outputs[0]
    ours: Params = {pipeline.outputs[output]: options} if options else {}
    given: dict[str, list[Payload]] = {endpoint.input: [{"messages": [], "audio": [clip]}]}
    return Question(pipeline.name, [output], given, _merged(ours, params), [AUDIO], _seed(None))


def picture(
    pipeline: Pipeline,
    prompt: str,
    *,
    negative_prompt: str | None,
    images: Sequence[Rgb],
    params: dict[str, Any],
    seed: int | None,
) -> Question:
    """Words, and perhaps pictures to be changed, to a picture. All stages get ``params``.

    Raises CannotDo for a pipeline that can't.
    """
    endpoint = _endpoint(pipeline, "edits" if images else "images")
    payload: Payload = {"prompt": prompt}
    if negative_prompt is not None:
        payload["negative_prompt"] = negative_prompt
    if images:
        payload["images"] = list(images)
    every = {stage: dict(params) for stage in pipeline.stages} if params else {}
    has = [IMAGE] if images else []
    return Question(pipeline.name, [IMAGE], {endpoint.input: [payload]}, every, has, _seed(seed))


def _endpoint(pipeline: Pipeline, name: str) -> Endpoint:
    endpoint = pipeline.endpoints.get(name)
    if endpoint is None:
        offered = ", ".join(pipeline.endpoints) or "none"
        raise CannotDo(f"{pipeline.name} has no {name} endpoint; it has: {offered}")
    return endpoint


def _check_outputs(pipeline: Pipeline, outputs: list[str]) -> None:
    if not outputs:
        raise CannotDo("no output is asked for")
    for name in outputs:
        if name not in pipeline.outputs:
            offered = ", ".join(pipeline.outputs)
            raise CannotDo(f"{pipeline.name} has no output {name!r}; it has: {offered}")


def _speakers(pipeline: Pipeline) -> list[str]:
    """The stages that only speech needs."""
    has = set(pipeline.takes())
    text = pipeline.needed([TEXT], set(), has) if TEXT in pipeline.outputs else []
    audio = pipeline.needed([AUDIO], set(), has) if AUDIO in pipeline.outputs else []
    return [stage for stage in audio if stage not in text]


def _merged(ours: Params, theirs: Params | None) -> Params:
    merged = dict(ours)
    for stage, values in (theirs or {}).items():
        merged[stage] = {**merged.get(stage, {}), **values}
    return merged


def _seed(seed: int | None) -> int:
    return secrets.randbits(32) if seed is None else seed
