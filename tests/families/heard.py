"""A spoken pipeline in real processes, and what its caller got."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adapters.chunk import Payload
from broker.protocol import Timing
from tests.house import House

Houses = Callable[..., House]
START_S = 900.0  # four engines load torch and transformers at once, on a busy machine
#: A small memory, and films in the size that these tests make them.
SETTINGS = (
    "thinker.kv_cache_gib=0.05",
    "talker.kv_cache_gib=0.05",
    "encoder.video_max_pixels=9216",
    "encoder.video_min_pixels=1024",
)


async def start(home: House, pipeline: str, checkpoint: Path) -> None:
    """Returns when all stages are ready."""
    stages = [option for setting in SETTINGS for option in ("--stage", setting)]
    home.start("--pipeline", pipeline, "--model", str(checkpoint), *stages, ready=False)
    await asyncio.to_thread(home.until, home.is_ready, START_S)


class Heard(NamedTuple):
    """One answer."""

    text: str
    tokens: list[int]
    wave: np.ndarray[Any, Any]
    attempts: dict[str, int]

    @classmethod
    def of(cls, payloads: Mapping[str, list[Payload]], timings: Iterable[Timing]) -> Heard:
        """From the payloads of each output."""
        return cls(
            "".join(payload["text"] for payload in payloads["text"]),
            [token for payload in payloads["text"] for token in payload["token_ids"]],
            np.concatenate([np.array(payload["audio"]) for payload in payloads["audio"]]),
            {timing.stage: timing.attempts for timing in timings},
        )

    def assert_same(self, other: Heard) -> None:
        """Text and tokens equal, the waveform but for rounding."""
        assert (self.text, self.tokens) == (other.text, other.tokens)
        np.testing.assert_allclose(self.wave, other.wave, rtol=0, atol=1e-4)
