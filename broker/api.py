"""The Python API.

from broker import Omni

with Omni("voice") as omni:
    result = omni.generate("What is the capital of France?")
    print(result.text, result.audio, result.sample_rate)
    for event in omni.stream("Tell me a story."): ...
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import numpy.typing as npt
import uvloop

from broker import exchange
from broker.address import endpoints
from broker.attached import Attached, Messages
from broker.client import BrokerError, BrokerGone, Client
from broker.clips import RATE, clip
from broker.exchange import (
    AudioEvent,
    DoneEvent,
    Event,
    OutputEvent,
    Params,
    Question,
    Result,
    TextEvent,
    Usage,
)
from broker.pixels import picture, video
from broker.private import OmniError, PrivateBroker
from pipelines.graph import Pipeline
from pipelines.loader import load

__all__ = [
    "AudioEvent",
    "BrokerError",
    "DoneEvent",
    "Event",
    "Omni",
    "OmniError",
    "OutputEvent",
    "Result",
    "TextEvent",
    "Usage",
]

T = TypeVar("T")
END_S = 1.0  #: what is open ends by itself within so long when the client leaves
NOT_STARTED = "it is not started; use `with Omni(...) as omni:`"

Recording = npt.ArrayLike | tuple[npt.ArrayLike, int]


class ChatOptions(TypedDict, total=False):
    """How an answer is made; None is as good as absent."""

    audio: Sequence[Recording]  #: belongs to the last user message: samples at 16 kHz, or (samples, Hz)
    images: Sequence[npt.ArrayLike]  #: as `audio`: uint8 [height, width, 3]
    videos: Sequence[
        tuple[npt.ArrayLike, float]
    ]  #: as `audio`: (uint8 [frames, height, width, 3], frames a second)
    seed: int | None  #: the same seed gives the same answer; drawn if absent (see `Result.seed`)
    max_tokens: int | None  #: the text's length at most
    temperature: float | None  #: 0 takes the likeliest token always
    top_p: float | None  #: nucleus sampling
    stop: list[str] | None  #: the text ends before the first of these
    voice: str | None  #: one of the speaking stages' voices
    speed: float | None  #: 1.0 is the voice's own
    params: Params | None  #: stage -> parameters, which win over those above


class Omni:
    """A pipeline to call. Connects to a broker that serves it already, else starts one of its own.

    Thread-safe. Requests that fail raise :class:`broker.client.BrokerError`, whose ``error`` has the HTTP
    status that the gateway would have answered with.

    Args:
        pipeline: A pipeline that ships, a YAML file, or a folder with a pipeline.yaml.
        address: Connect to the broker there, and never start one.
        stage: Settings like "thinker.max_num_seqs=32"; with any, a broker is always started.
        model: Of all stages that have one: a name, a folder or "tiny-random"; so too.
        timeout_s: How long to wait until every stage has a worker (models are fetched on first use).

    Raises:
        PipelineError: The pipeline can't be loaded.
        OmniError: The broker can't be started or reached.
    """

    def __init__(
        self,
        pipeline: str = "voice",
        *,
        address: str | None = None,
        stage: Sequence[str] = (),
        model: str | None = None,
        timeout_s: float = 900.0,
    ) -> None:
        self._wanted = pipeline
        self._address = address
        self._stage = list(stage)
        self._model = model
        self._timeout_s = timeout_s
        self._private: PrivateBroker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Client
        self._pipeline: Pipeline

    # --- life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Connects, or starts a broker and waits for its workers. Once; `with` does it."""
        if self._loop is not None:
            raise OmniError("it has been started already")
        loop = self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="omni", daemon=True)
        self._thread.start()
        try:
            if self._address is not None:
                self._run(self._connect(self._address))
            elif self._stage or self._model is not None or not self._run(self._join()):
                self._run(self._start_private())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Aborts what is open, and ends the broker if it was started here. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._leave(), loop).result()
        if self._private is not None:
            self._private.stop()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()

    async def _leave(self) -> None:
        """Leaves the broker. Who waits for an answer in another thread gets an error instead of nothing."""
        if hasattr(self, "_client"):
            await self._client.close()
        late = asyncio.all_tasks() - {asyncio.current_task()}
        if late:
            _, late = await asyncio.wait(late, timeout=END_S)
        if late:
            for task in late:
                task.cancel()
            await asyncio.wait(late, timeout=END_S)

    async def _connect(self, address: str | None) -> None:
        """To a broker that must serve the pipeline. Raises OmniError."""
        client = Client(address)
        try:
            await client.connect()
        except BrokerGone as error:
            raise OmniError(str(error)) from None
        self._client = client
        if self._wanted not in client.pipelines:
            served = ", ".join(client.pipelines)
            raise OmniError(
                f"the broker at {address} serves no pipeline {self._wanted!r}; it serves: {served}"
            )
        self._pipeline = client.pipelines[self._wanted]

    async def _join(self) -> bool:
        """Joins the broker of the run folder if it is there and serves just this pipeline."""
        wanted = load(self._wanted)
        if not _has_socket():
            return False
        client = Client()
        try:
            await client.connect(2.0)
        except BrokerGone:
            return False
        served = client.pipelines.get(wanted.name)
        if served is None or (self._wanted != wanted.name and served != wanted):
            await client.close()
            return False
        self._client, self._pipeline = client, served
        return True

    async def _start_private(self) -> None:
        wanted = load(self._wanted, self._stage, [] if self._model is None else [self._model])
        self._private = PrivateBroker(self._wanted, self._stage, self._model)
        client = Client(self._private.address)
        try:
            await self._private.ready(client, self._timeout_s)
        except BaseException:
            await client.close()
            raise
        self._client, self._pipeline = client, client.pipelines[wanted.name]

    # --- requests

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that is served, with its stages and outputs."""
        if self._loop is None:
            raise OmniError(NOT_STARTED)
        return self._pipeline

    @property
    def address(self) -> str | None:
        """Where its broker is; None: the run folder."""
        return self._private.address if self._private is not None else self._address

    def generate(
        self,
        prompt: str | Messages,
        modalities: Sequence[str] | None = None,
        **options: Unpack[ChatOptions],
    ) -> Result:
        """Answers a prompt, or a conversation in OpenAI's form, and returns it whole.

        Args:
            prompt: Text, or ``[{"role": ..., "content": ...}, ...]``; in it a part
                ``{"type": "audio", "index": i}`` stands for the i-th recording, "image" and "video" likewise.
            modalities: Names of outputs ("text", "audio", ...); None: what the pipeline's chat offers.
            options: See :class:`ChatOptions`.

        Raises:
            BrokerError: The request was refused or has failed.
            ValueError: The pipeline can't do that.
        """
        return self._run(self._whole(self._question(prompt, modalities, options)))

    def stream(
        self,
        prompt: str | Messages,
        modalities: Sequence[str] | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[Event]:
        """Like :meth:`generate`, but yields the answer as it comes; the last event is a DoneEvent.

        Closing the iterator aborts the request.
        """
        return self._events(self._question(prompt, modalities, options))

    def speak(
        self,
        text: str,
        *,
        voice: str | None = None,
        speed: float | None = None,
        seed: int | None = None,
        params: Params | None = None,
    ) -> Result:
        """Speaks a text as it is; the result holds audio only. Raises as :meth:`generate` does."""
        spoken = _given(voice=voice, speed=speed)
        return self._run(
            self._whole(exchange.speech(self.pipeline, text, voice=spoken, params=params, seed=seed))
        )

    def transcribe(
        self,
        audio: Recording,
        rate: int = RATE,
        *,
        language: str | None = None,
        params: Params | None = None,
    ) -> Result:
        """Writes a recording down: :attr:`Result.text`, and the segments under outputs["transcript"].

        Args:
            audio: 1-D samples, floats in [-1, 1] or int16; or (samples, Hz), as :meth:`generate` takes them.
            rate: Their rate in Hz.
            language: ISO code; None: the engine listens.
            params: Stage -> parameters.

        Raises as :meth:`generate` does.
        """
        samples, rate = audio if isinstance(audio, tuple) else (audio, rate)
        question = exchange.transcription(
            self.pipeline, clip(samples, rate), options=_given(language=language), params=params
        )
        result = self._run(self._whole(question))
        segments = result.outputs.get(question.outputs[0], [])
        words = (segment.get("text", "").strip() for segment in segments)
        return result.with_text(" ".join(word for word in words if word))

    def _question(
        self, prompt: str | Messages, modalities: Sequence[str] | None, options: ChatOptions
    ) -> Question:
        return exchange.chat(
            self.pipeline,
            prompt,
            modalities,
            attached=Attached(
                [clip(*r) if isinstance(r, tuple) else clip(r) for r in options.get("audio", ())],
                [picture(pixels) for pixels in options.get("images", ())],
                [video(frames, fps) for frames, fps in options.get("videos", ())],
            ),
            sampling=_picked(options, ("max_tokens", "temperature", "top_p", "stop")),
            voice=_picked(options, ("voice", "speed")),
            params=options.get("params"),
            seed=options.get("seed"),
        )

    async def _whole(self, question: Question) -> Result:
        async for event in exchange.exchange(self._client, question):
            if isinstance(event, DoneEvent):
                return event.result
        raise AssertionError("an exchange ends with its DoneEvent")

    def _events(self, question: Question) -> Iterator[Event]:
        events = exchange.exchange(self._client, question)
        try:
            while (event := self._run(_next(events))) is not None:
                yield event
        finally:
            if self._loop is not None:
                self._run(events.aclose())

    # --- the loop's thread

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs on the loop's thread; an interrupt here cancels it there."""
        if self._loop is None:
            work.close()
            raise OmniError(NOT_STARTED)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException as error:
            future.cancel()
            if isinstance(error, CancelledError) and self._loop is None:
                raise OmniError("it was closed before the answer was there") from None
            raise


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)


def _picked(options: ChatOptions, names: Sequence[str]) -> dict[str, Any]:
    return _given(**{name: options.get(name) for name in names})


def _given(**values: Any) -> dict[str, Any]:
    """Those that the caller set."""
    return {name: value for name, value in values.items() if value is not None}


def _has_socket() -> bool:
    """Whether the run folder has a broker's socket: it spares us the wait for one that never was."""

    return Path(endpoints().clients.removeprefix("ipc://")).exists()
