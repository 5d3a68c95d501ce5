"""The pipeline as a user starts it: real processes, two of which are killed half-way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.families.requests import REQUESTS
from tests.house import House

Houses = Callable[..., House]
START_S = 240.0  # four engines load torch and transformers at once
#: The text is longer than a thinker may be ahead of its reader.
PARAMS: dict[str, dict[str, Any]] = {
    "thinker": {"max_tokens": 120, "ignore_eos": True, "temperature": 0.9},
    "talker": {"max_tokens": 90},
}
#: A small memory, and films in the size that these tests make them.
SETTINGS = (
    "thinker.kv_cache_gib=0.05",
    "talker.kv_cache_gib=0.05",
    "encoder.video_max_pixels=9216",
    "encoder.video_min_pixels=1024",
)


class Heard(NamedTuple):
    text: str
    tokens: list[int]
    wave: np.ndarray[Any, Any]
    attempts: dict[str, int]


async def ask(home: House, *kill: str) -> Heard:
    """One sampled answer; the engines of these stages are killed half-way.

    That is while the text is not read, so the thinker waits for its reader, and the talker for the thinker.
    """
    seen: dict[str, list[Any]] = {"text": [], "audio": []}
    spoken = home.stage("qwen3_omni", "talker")["chunks"]
    async with (
        home.client() as client,
        await client.submit(
            "qwen3_omni",
            outputs=["text", "audio"],
            given={"request": [REQUESTS["mixed"]]},
            params=PARAMS,
            seed=7,
            has=["audio", "image", "video"],
        ) as stream,
    ):
        async for output, payload in stream:
            seen[output].append(payload)
            if kill and output == "text" and len(seen["text"]) == 2:
                await asyncio.to_thread(
                    home.until, lambda: home.stage("qwen3_omni", "talker")["chunks"] >= spoken + 6
                )
                for stage in kill:
                    (pid,) = await asyncio.to_thread(home.pids, "qwen3_omni", stage)
                    os.kill(pid, signal.SIGKILL)
    return Heard(
        "".join(payload["text"] for payload in seen["text"]),
        [token for payload in seen["text"] for token in payload["token_ids"]],
        np.concatenate([np.array(payload["audio"]) for payload in seen["audio"]]),
        {timing.stage: timing.attempts for timing in stream.timings},
    )


async def test_killed_engines_change_nothing(house: Houses, checkpoint: Path) -> None:
    home = house()
    stages = [option for setting in SETTINGS for option in ("--stage", setting)]
    home.start("--pipeline", "qwen3_omni", "--model", str(checkpoint), *stages, ready=False)
    await asyncio.to_thread(home.until, home.is_ready, START_S)
    whole = await ask(home)
    assert set(whole.attempts.values()) == {1}
    again = await ask(home, "thinker", "talker")
    assert (again.attempts["thinker"], again.attempts["talker"]) == (2, 2)
    assert (again.text, again.tokens) == (whole.text, whole.tokens)
    np.testing.assert_allclose(again.wave, whole.wave, rtol=0, atol=1e-4)
