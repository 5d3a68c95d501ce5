"""The pipeline as a user starts it: real processes, of which the denoiser is killed amid an edit."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.diffusion_rig import running
from tests.families.heard import START_S, Houses
from tests.families.requests import picture

#: The first picture on the way comes after a third of the steps: the denoiser has much to do still.
PARAMS = {"num_inference_steps": 200, "partial_images": 2, "width": 64, "height": 64}
REQUEST = {"prompt": "make it red", "negative_prompt": "", "images": [picture(32, 96)]}


async def test_a_killed_denoiser_changes_nothing_in_an_edit(house: Houses, edits: Path) -> None:
    home = house()
    settings = ["picture.family_options={area: 9216}"]
    home.start("--pipeline", "qwen_image", "--model", str(edits), "--stage", settings[0], ready=False)
    await asyncio.to_thread(home.until, home.is_ready, START_S)
    stages = ("text", "picture", "denoiser", "vae")
    images: list[dict[str, Any]] = []
    async with (
        home.client() as client,
        await client.submit(
            "qwen_image",
            outputs=["image"],
            given={"request": [REQUEST]},
            params=dict.fromkeys(stages, PARAMS),
            seed=11,
            has=["image"],
        ) as stream,
    ):
        async for _, payload in stream:
            images.append({**payload, "image": np.array(payload["image"])})
            if len(images) == 1:
                (pid,) = await asyncio.to_thread(home.pids, "qwen_image", "denoiser")
                os.kill(pid, signal.SIGKILL)
    attempts = {timing.stage: timing.attempts for timing in stream.timings}
    assert attempts == {"text": 1, "picture": 1, "denoiser": 2, "vae": 1}
    assert [payload.get("partial") for payload in images] == [0, 1, None]
    async with running("qwen_image", edits, *settings) as rig:
        whole = await rig.paint(REQUEST, seed=11, has=["image"], **PARAMS)
    for one, other in zip(images, whole.made["vae"], strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])
