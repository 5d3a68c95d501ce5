"""The pipeline as a user starts it: real processes, of which one half of a denoiser is killed half-way."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.diffusion_rig import reference
from tests.families.heard import START_S, Houses

#: The first picture on the way comes after a third of the steps: the denoiser has much to do still.
PARAMS = {"num_inference_steps": 150, "partial_images": 2, "width": 64, "height": 64}


async def test_a_killed_second_rank_takes_its_denoiser_with_it_and_changes_nothing(
    house: Houses, checkpoint: Path, pipe: Any
) -> None:
    home = house()
    parallel = ("--stage", "denoiser.cfg=parallel", "--stage", "denoiser.threads=1")
    home.start("--pipeline", "sd3", "--model", str(checkpoint), *parallel, ready=False)
    await asyncio.to_thread(home.until, home.is_ready, START_S)
    images: list[dict[str, Any]] = []
    async with (
        home.client() as client,
        await client.submit(
            "sd3",
            outputs=["image"],
            given={"request": [{"prompt": "a ship"}]},
            params=dict.fromkeys(("text", "denoiser", "vae"), PARAMS),
            seed=11,
        ) as stream,
    ):
        async for _, payload in stream:
            images.append({**payload, "image": np.array(payload["image"])})
            if len(images) == 1:
                (pid,) = await asyncio.to_thread(home.pids, "sd3", "denoiser")
                os.kill(second_rank(pid), signal.SIGKILL)
    attempts = {timing.stage: timing.attempts for timing in stream.timings}
    assert attempts == {"text": 1, "denoiser": 2, "vae": 1}
    assert [payload.get("partial") for payload in images] == [0, 1, None]
    expected = reference(pipe, seed=11, prompt="a ship", num_inference_steps=150, width=64, height=64)
    assert np.abs(images[-1]["image"] - np.round(expected.pixels * 255)).max() <= 1


def second_rank(engine: int) -> int:
    """The process that computes an engine's negative branches."""
    (rank,) = [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if (process / "stat").exists()
        and (process / "stat").read_text().rpartition(")")[2].split()[1] == str(engine)
        and b"workers.engines.diffusion.rank" in (process / "cmdline").read_bytes()
    ]
    return rank
