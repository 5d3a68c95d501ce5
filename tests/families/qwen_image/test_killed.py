"""Real processes, of which the denoiser is killed amid an edit."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.families.diffusion_rig import running
from tests.families.heard import Houses
from tests.families.killed import with_a_kill
from tests.families.requests import picture

#: The first picture on the way comes after a third of the steps, and the denoiser waits at half of them.
PARAMS = {"num_inference_steps": 200, "partial_images": 2, "width": 64, "height": 64}
REQUEST = {"prompt": "make it red", "negative_prompt": "", "images": [picture(32, 96)]}


async def test_a_killed_denoiser_changes_nothing_in_an_edit(house: Houses, edits: Path) -> None:
    settings = "picture.family_options={area: 9216}"
    images = await with_a_kill(house, "qwen_image", edits, (REQUEST, PARAMS, 11), settings, has=["image"])
    async with running("qwen_image", edits, settings) as rig:
        whole = await rig.paint(REQUEST, seed=11, has=["image"], **PARAMS)
    for one, other in zip(images, whole.made["vae"], strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])
