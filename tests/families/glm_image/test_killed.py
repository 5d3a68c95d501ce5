"""Real processes, of which the denoiser is killed half-way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.families.diffusion_rig import reference
from tests.families.heard import Houses
from tests.families.killed import with_a_kill

SMALL = ("thinker.kv_cache_gib=0.05", "thinker.block_size=16")
STEPS = {"num_inference_steps": 90, "width": 64, "height": 64}
#: The first picture on the way comes before half of the steps, where the denoiser waits.
PARAMS = {**STEPS, "partial_images": 2, "temperature": 0.0}


async def test_a_killed_denoiser_changes_nothing(house: Houses, checkpoint: Path, pipe: Any) -> None:
    asked = ({"prompt": "a sign: 'hello'"}, PARAMS, 11)
    images = await with_a_kill(house, "glm_image", checkpoint, asked, *SMALL)
    expected = reference(pipe, seed=11, **asked[0], **STEPS)
    assert np.abs(images[-1]["image"] - np.round(expected.pixels * 255)).max() <= 1
