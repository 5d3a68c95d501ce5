"""The pipeline as a user starts it: real processes, two of which are killed half-way."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from tests.families.heard import Heard, Houses, start
from tests.families.requests import REQUESTS
from tests.house import House

#: The text is longer than a thinker may be ahead of its reader.
PARAMS: dict[str, dict[str, Any]] = {
    "thinker": {"max_tokens": 120, "ignore_eos": True, "temperature": 0.9},
    "talker": {"max_tokens": 90},
}


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
    return Heard.of(seen, stream.timings)


async def test_killed_engines_change_nothing(house: Houses, checkpoint: Path) -> None:
    home = house()
    await start(home, "qwen3_omni", checkpoint)
    whole = await ask(home)
    assert set(whole.attempts.values()) == {1}
    again = await ask(home, "thinker", "talker")
    assert (again.attempts["thinker"], again.attempts["talker"]) == (2, 2)
    again.assert_same(whole)
