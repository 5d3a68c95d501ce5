"""From text to a waveform and to what Whisper is fed, without a broker."""

from __future__ import annotations

import re
from collections.abc import Sequence

import av
import numpy as np
from numpy.typing import NDArray

from adapters.chunk import Payload
from adapters.window import windows
from pipelines.graph import Window
from tests.engines.helpers import collect, job, stream
from workers.engines.vits_acoustic import VitsAcousticEngine
from workers.engines.vits_decoder import VitsDecoderEngine

Audio = NDArray[np.float32]
WINDOW = Window(frames=45, left=16, right=16)  # as in the voice pipeline


async def spoken(
    engine: VitsAcousticEngine, *sentences: str, seed: int = 1, **params: object
) -> list[Payload]:
    """What the acoustic engine makes of sentences."""
    return await collect(engine, job(*({"text": text} for text in sentences), seed=seed, **params))


async def cut(payloads: Sequence[Payload], window: Window = WINDOW) -> list[Payload]:
    """What comes over the edge between the two halves."""
    return [payload async for payload in windows(stream(payloads), window)]


async def decoded(engine: VitsDecoderEngine, payloads: Sequence[Payload]) -> Audio:
    """The joined waveform of all payloads."""
    parts = [payload["audio"] for payload in await collect(engine, job(*payloads))]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def pcm(audio: Audio) -> NDArray[np.int16]:
    """16-bit samples, as callers get them."""
    return np.round(np.clip(audio, -1, 1) * 32767).astype(np.int16)


def at_16_khz(audio: Audio, rate: int) -> Audio:
    """Resampled for Whisper."""
    frame = av.AudioFrame.from_ndarray(audio[None], "fltp", "mono")
    frame.sample_rate = rate
    resampler = av.AudioResampler("fltp", "mono", 16_000)
    return np.concatenate(
        [part.to_ndarray()[0] for part in resampler.resample(frame) + resampler.resample(None)]
    )


def word_errors(truth: str, heard: str) -> float:
    """Word error rate: edits between the words of two texts, per word of the first."""
    expected, got = (re.findall(r"[a-z0-9']+", text.lower()) for text in (truth, heard))
    row = list(range(len(got) + 1))
    for i, left in enumerate(expected, 1):
        before, row = row, [i]
        for j, right in enumerate(got, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (left != right)))
    return row[-1] / len(expected)
