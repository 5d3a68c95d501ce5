"""Engine ``whisper``: speech to text with faster-whisper, segment by segment as they are decoded.

A model call takes a second and more and can't be stopped, so all of them run on one thread, one segment at a
time: jobs take turns, and a cancel waits for one segment at most.

The model reads a clip in windows of up to 30 s, and a window's segments come out of one pass. A new attempt
skips the clips that are done, begins with the window that was in hand, and drops those of its segments that
are out. So at most one window is heard again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from adapters.chunk import Payload
from pipelines import models
from pipelines.graph import Stage
from pipelines.options import WhisperOptions, options_of
from workers.engine import ItemError, Job
from workers.optional import library
from workers.params import checked

SAMPLE_RATE = 16_000

#: A clip below this is too short for a word.
SHORTEST_S = 0.1

#: Of the model's seek positions.
FRAMES_PER_S = 100

T = TypeVar("T")
Clip = NDArray[np.float32]


class WhisperParams(msgspec.Struct, frozen=True):
    """A request's wishes."""

    language: str | None = None  #: ISO code; None: the stage's option, else detected
    prompt: str | None = None  #: words and spellings to expect
    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0  #: above 0 another attempt may hear other words


class Heard(NamedTuple):
    """Where a new attempt goes on."""

    clip: int  #: the first one that is not done
    segments: int = 0  #: of it that are out
    window: int = 0  #: where to begin in it, in frames of its speech
    before: int = 0  #: its segments before that window
    language: str | None = None  #: of it, as far as it is known


class WhisperEngine:
    """Clips in, their segments out: {"index", "text", "start", "end", "language"}, and a "done" per clip."""

    resumes = True
    _model: Any

    def __init__(self, stage: Stage, *, device: str) -> None:
        self.stage = stage
        self.device = device
        self.options = options_of(stage, WhisperOptions)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="whisper")

    async def start(self) -> None:
        """Loads the model. Raises RuntimeError naming the extra to install when faster-whisper is missing."""
        self._model = await self._in_thread(self._load)
        self._language(None)

    def _load(self) -> Any:
        kind, _, number = self.device.partition(":")
        return library("faster_whisper", "speech").WhisperModel(
            str(models.ensure(self.stage.model or "")),
            device=kind,
            device_index=int(number or 0),
            compute_type=self.options.compute_type,
            cpu_threads=self.stage.resources.threads,
        )

    async def stop(self) -> None:
        """Lets the model go."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        del self._model

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """Transcribes the clips of a job one after the other."""
        params = checked(job.params, WhisperParams)
        language = self._language(params.language)
        begin = heard(job)
        index = 0
        for stream in job.inputs.values():
            async for payload in stream:
                for clip in clips_of(payload):
                    if index >= begin.clip:
                        known = begin if index == begin.clip else Heard(index)
                        async for part in self._clip(job, clip, params, known.language or language, known):
                            yield {"index": index, **part}
                    index += 1

    def _language(self, wanted: str | None) -> str | None:
        language = wanted or self.options.language
        allowed = self._model.supported_languages
        if language is not None and language not in allowed:
            message = f"language: no language {language[:80]!r}; the model knows {', '.join(allowed)}"
            raise ItemError(message, status=400, param="language")
        return language

    async def _clip(
        self, job: Job, clip: Clip, params: WhisperParams, language: str | None, begin: Heard
    ) -> AsyncIterator[Payload]:
        """A clip's payloads that are not out, less its index."""
        duration = len(clip) / SAMPLE_RATE
        if duration >= SHORTEST_S:
            segments, language = await self._in_thread(self._begin, clip, params, language, begin.window)
            number, window = begin.before, begin.window
            while (segment := await self._in_thread(next, segments, None)) is not None:
                if segment.seek != window:
                    window = segment.seek
                    if (
                        number
                    ):  # the prompt counts until there is a segment, so only then is this a fresh start
                        await job.checkpoint({"clip": begin.clip, "window": window, "before": number})
                number += 1
                if number > begin.segments:
                    yield {
                        "text": segment.text,
                        "start": float(segment.start),
                        "end": min(float(segment.end), duration),
                        "language": language,
                    }
        yield {"text": "", "done": True, "language": language or "", "duration": duration}

    def _begin(
        self, clip: Clip, params: WhisperParams, language: str | None, window: int
    ) -> tuple[Iterator[Any], str]:
        segments, info = self._model.transcribe(
            clip,
            language=language,
            initial_prompt=params.prompt or None,
            temperature=params.temperature,
            beam_size=self.options.beam_size,
            vad_filter=True,  # in silence the model hears words that nobody said
            condition_on_previous_text=False,  # else one slip is repeated to the clip's end
        )
        if window:
            # The segments are computed as they are asked for, by these options. As an argument of transcribe
            # the place would switch the filter off.
            info.transcription_options.clip_timestamps = [window / FRAMES_PER_S]
            info.transcription_options.initial_prompt = None
        return iter(segments), info.language

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def heard(job: Job) -> Heard:
    """What earlier attempts have done of a job."""
    clip = sum("done" in payload for payload in job.resumed)
    out = [payload for payload in job.resumed if payload["index"] == clip]
    language = out[-1]["language"] if out else None
    state = job.resume_state or {}
    if state.get("clip") == clip and state["before"] <= len(out):
        return Heard(clip, len(out), state["window"], state["before"], language)
    return Heard(clip, len(out), language=language)


def clips_of(payload: Payload) -> list[Clip]:
    """The clips of a payload, float32 mono at 16 kHz. Raises :class:`ItemError` (400) for what is none."""
    clips = payload.get("audio", [])
    if not isinstance(clips, list):
        clips = [clips]
    for number, clip in enumerate(clips):
        if not isinstance(clip, np.ndarray) or clip.dtype != np.float32 or clip.ndim != 1:
            raise ItemError(f"audio[{number}]: expected float32 [samples]", status=400, param="audio")
        if not np.isfinite(clip).all():
            raise ItemError(f"audio[{number}]: holds NaN or infinity", status=400, param="audio")
    return clips
