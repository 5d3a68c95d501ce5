"""Engine ``vits-acoustic``: the acoustic half of a VITS voice, from sentences to latent frames.

Noise comes from the job's seed and the utterance's number, so a seed gives the same speech, alone or beside
others. Utterances that share a pass differ by some 1e-4 from those computed alone (matrices of another height
are added up in another order), and on a CPU a shared pass is hardly faster. So each utterance has a pass to
itself, and jobs take turns, unless the stage's option ``exact`` is false.

Since the noise depends on nothing else, a new attempt goes on with the first utterance that is not out yet;
of those before it only finds the phonemes, to count them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from adapters.chunk import Payload
from pipelines.graph import Stage
from pipelines.options import VitsAcousticOptions, options_of
from workers.batching import BatchingEngine
from workers.engine import OUT, ItemError, Job
from workers.engines.phonemes import Phonemizer
from workers.engines.vits import Voice, finite, open_session, open_voice
from workers.params import checked

DEFAULT_VOICE = "default"

#: Frames of noise made for each phoneme id at normal speed, about twice the most that one takes on average.
NOISE_FRAMES = 6


class SpeechParams(msgspec.Struct, frozen=True):
    """A request's wishes."""

    voice: str = DEFAULT_VOICE
    speed: Annotated[float, Meta(ge=0.25, le=4)] = 1.0


class Utterance(msgspec.Struct, frozen=True):
    """What one pass needs."""

    ids: list[int]
    length_scale: float
    seed: tuple[int, int]  #: the job's, and the utterance's number in the job

    def noise(self, channels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Normal noise [2, ids] for the durations and [channels, any] for the frames."""
        generator = np.random.default_rng(self.seed)
        count = len(self.ids)
        frames = int(count * NOISE_FRAMES * max(self.length_scale, 1.0))
        return (
            generator.standard_normal((2, count), np.float32),
            generator.standard_normal((channels, frames), np.float32),
        )


class VitsAcousticEngine(BatchingEngine[Utterance, NDArray[np.float32]]):
    """Sentences in, {"frames": float32 [channels, n], ...} out, one payload an utterance."""

    _voice: Voice
    _session: Any
    _phonemizer: Phonemizer

    def __init__(self, stage: Stage, *, device: str) -> None:
        super().__init__(stage, device=device)
        self.options = options_of(stage, VitsAcousticOptions)
        if self.options.exact:
            self.max_batch_size = 1

    def load(self) -> None:
        """Opens the voice. Raises RuntimeError naming the extra to install when a library is missing."""
        folder, self._voice = open_voice(self.stage)
        self._phonemizer = Phonemizer(self._voice)
        self._session = open_session(folder / "acoustic.onnx", self.stage, self.device)

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """Speaks each sentence as it comes."""
        params = checked(job.params, SpeechParams)
        self._check_voice(params.voice)
        length_scale = (self.options.length_scale or self._voice.inference.length_scale) / params.speed
        number = out = 0  # utterances; payloads
        for stream in job.inputs.values():
            async for payload in stream:
                text = text_of(payload)
                utterances = self._phonemizer.ids(text)
                if not utterances:
                    yield self._payload(np.zeros((self._voice.channels, 0), np.float32), text)
                    out += 1
                for ids in utterances:
                    if out < job.emitted:
                        yield OUT
                    else:
                        seed = (job.seed & (1 << 64) - 1, number)
                        yield self._payload(await self.submit(Utterance(ids, length_scale, seed)), text)
                    number += 1
                    out += 1
                    text = ""  # it stands in the first of the sentence's payloads

    def _check_voice(self, voice: str) -> None:
        offered = [*(self.options.voices or [self._voice.name]), DEFAULT_VOICE]
        if voice not in offered:
            names = ", ".join(offered)
            raise ItemError(f"voice: no voice {voice[:80]!r}; there are {names}", status=400, param="voice")

    def _payload(self, frames: NDArray[np.float32], text: str) -> Payload:
        return {
            "frames": frames,
            "segment_end": True,
            "text": text,
            "sample_rate": self._voice.audio.sample_rate,
            "hop": self._voice.hop,
        }

    def key(self, item: Utterance) -> Hashable:
        """The speed is a setting of the whole pass."""
        return item.length_scale

    def forward(self, items: Sequence[Utterance]) -> list[NDArray[np.float32] | Exception]:
        """One pass, padded to the longest."""
        lengths = np.array([len(item.ids) for item in items], np.int64)
        noises = [item.noise(self._voice.channels) for item in items]
        inference, options = self._voice.inference, self.options
        scales = (
            inference.noise_scale if options.noise_scale is None else options.noise_scale,
            items[0].length_scale,
            inference.noise_w if options.noise_w is None else options.noise_w,
        )
        z, frames = self._session.run(
            ("z", "frames"),
            {
                "ids": padded([np.array(item.ids, np.int64) for item in items]),
                "lengths": lengths,
                "scales": np.array(scales, np.float32),
                "duration_noise": padded([noise[0] for noise in noises]),
                "frame_noise": padded([noise[1] for noise in noises]),
            },
        )
        return [finite(row[:, :count].copy()) for row, count in zip(z, frames, strict=True)]


def text_of(payload: Payload) -> str:
    """The sentence of a payload. Raises :class:`ItemError` (400) without one."""
    text = payload.get("text")
    if not isinstance(text, str):
        raise ItemError(f"text: expected a string, got {type(text).__name__}", status=400, param="text")
    return text


def padded(rows: list[NDArray[Any]]) -> NDArray[Any]:
    """Arrays that differ in their last axis, stacked with zeros at their ends."""
    longest = max(row.shape[-1] for row in rows)
    return np.stack([np.pad(row, [(0, 0)] * (row.ndim - 1) + [(0, longest - row.shape[-1])]) for row in rows])
