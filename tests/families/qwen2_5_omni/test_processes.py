"""The pipeline as a user starts it: real processes, of which some are killed half-way."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

from tests.families.heard import Heard, Houses, start
from tests.families.requests import REQUESTS
from tests.house import House

#: The text is longer than a thinker may be ahead of its reader.
LIMITS = {"thinker": {"max_tokens": 120, "min_tokens": 120}, "talker": {"max_tokens": 400, "min_tokens": 400}}


async def ask(home: House, kind: str, *, kill: bool = False) -> Heard:
    """One sampled answer; with ``kill`` both language models are killed half-way.

    That is while the text is not read, so the thinker waits for its reader, and the talker for the thinker.
    """
    spoken = home.stage("qwen2_5_omni", "talker")["chunks"]
    params = {stage: {**limits, "temperature": 0.9} for stage, limits in LIMITS.items()}
    seen: dict[str, list[Any]] = {"text": [], "audio": []}
    async with (
        home.client() as client,
        await client.submit(
            "qwen2_5_omni",
            outputs=["text", "audio"],
            given={"request": [REQUESTS[kind]]},
            params=params,
            seed=7,
            has=["audio", "image", "video"],
        ) as stream,
    ):
        async for output, payload in stream:
            seen[output].append(payload)
            if kill and output == "text" and len(seen["text"]) == 2:
                await asyncio.to_thread(
                    home.until, lambda: home.stage("qwen2_5_omni", "talker")["chunks"] >= spoken + 3
                )
                for stage in ("thinker", "talker"):
                    (pid,) = await asyncio.to_thread(home.pids, "qwen2_5_omni", stage)
                    os.kill(pid, signal.SIGKILL)
    return Heard.of(seen, stream.timings)


def chat(home: House, **more: Any) -> dict[str, Any]:
    """One call over HTTP."""
    body = {
        "model": "qwen2_5_omni",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 5,
        "sampling_params_list": [{}, {}, {"max_tokens": 30, "min_tokens": 30}, {}],
        **more,
    }
    call = urllib.request.Request(
        f"{home.base_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(call, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


async def test_a_pipeline_of_processes_answers_and_killed_engines_change_nothing(
    house: Houses, checkpoint: Path
) -> None:
    home = house()
    await start(home, "qwen2_5_omni", checkpoint)

    spoken = await asyncio.to_thread(
        chat, home, modalities=["text", "audio"], audio={"voice": "Ethan", "format": "pcm16"}
    )
    message = spoken["choices"][0]["message"]
    assert len(base64.b64decode(message["audio"]["data"])) == 2 * 30 * 480
    assert spoken["usage"]["completion_tokens_details"]["text_tokens"] == 5
    await asyncio.to_thread(chat, home, modalities=["text"])
    # The talker has had the one request that was to be spoken.
    assert home.stage("qwen2_5_omni", "talker")["tasks"]["done"] == 1
    assert home.stage("qwen2_5_omni", "thinker")["tasks"]["done"] == 2

    whole = await ask(home, "mixed")
    assert set(whole.attempts.values()) == {1}
    again = await ask(home, "mixed", kill=True)
    assert (again.attempts["thinker"], again.attempts["talker"]) == (2, 2)
    again.assert_same(whole)
