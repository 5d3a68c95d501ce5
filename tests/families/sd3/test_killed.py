"""Real processes, of which one half of a denoiser is killed half-way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.families.diffusion_rig import reference
from tests.families.heard import Houses
from tests.families.killed import with_a_kill
from tests.leftovers import children

#: The first picture on the way comes after a third of the steps, and the denoiser waits at half of them.
PARAMS = {"num_inference_steps": 150, "partial_images": 2, "width": 64, "height": 64}


async def test_a_killed_second_rank_takes_its_denoiser_with_it_and_changes_nothing(
    house: Houses, checkpoint: Path, pipe: Any
) -> None:
    parallel = ("denoiser.cfg=parallel", "denoiser.threads=1")
    asked = ({"prompt": "a ship"}, PARAMS, 11)
    images = await with_a_kill(house, "sd3", checkpoint, asked, *parallel, victim=second_rank)
    expected = reference(pipe, seed=11, prompt="a ship", num_inference_steps=150, width=64, height=64)
    assert np.abs(images[-1]["image"] - np.round(expected.pixels * 255)).max() <= 1


def second_rank(engine: int) -> int:
    """The process that computes an engine's negative branches."""
    (rank,) = [pid for pid in children(engine) if b"workers.engines.diffusion.rank" in command(pid)]
    return rank


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
