"""The pipeline as a user starts it: real processes, of which some are killed half-way."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.families.requests import REQUESTS
from tests.house import House

Houses = Callable[..., House]
START_S = 900.0  # four engines load torch and transformers at once, on a busy machine
#: Long enough not to be over when it is time to kill.
LIMITS = {"thinker": {"max_tokens": 80, "min_tokens": 80}, "talker": {"max_tokens": 400, "min_tokens": 400}}
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


async def ask(home: House, kind: str, *, kill: bool = False) -> Heard:
    """One sampled answer; with ``kill`` both language models are killed when the first of theirs has come."""
    outputs = {"text": "thinker", "audio": "talker"} if kill else {}
    doomed = {
        output: await asyncio.to_thread(home.pids, "qwen2_5_omni", stage) for output, stage in outputs.items()
    }
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
            for pid in doomed.pop(output, ()):
                os.kill(pid, signal.SIGKILL)
    return Heard(
        "".join(payload["text"] for payload in seen["text"]),
        [token for payload in seen["text"] for token in payload["token_ids"]],
        np.concatenate([np.array(payload["audio"]) for payload in seen["audio"]]),
        {timing.stage: timing.attempts for timing in stream.timings},
    )


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
    stages = [option for setting in SETTINGS for option in ("--stage", setting)]
    home.start("--pipeline", "qwen2_5_omni", "--model", str(checkpoint), *stages, ready=False)
    await asyncio.to_thread(home.until, home.is_ready, START_S)

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
    assert (again.text, again.tokens) == (whole.text, whole.tokens)
    np.testing.assert_allclose(again.wave, whole.wave, rtol=0, atol=1e-4)
