"""Real processes, of which the denoiser is killed half-way."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.families.diffusion_rig import reference
from tests.families.heard import Houses
from tests.families.killed import with_a_kill

#: The first picture on the way comes after a third of the steps, and the denoiser waits at half of them.
PARAMS = {"num_inference_steps": 150, "partial_images": 2, "width": 64, "height": 48}


async def test_a_killed_denoiser_changes_nothing(house: Houses, dev: Path) -> None:
    from diffusers import FluxPipeline

    images = await with_a_kill(house, "flux", dev, ({"prompt": "a ship"}, PARAMS, 11))
    call = {name: value for name, value in PARAMS.items() if name != "partial_images"}
    expected = reference(FluxPipeline.from_pretrained(dev), seed=11, prompt="a ship", **call)
    assert np.abs(images[-1]["image"] - np.round(expected.pixels * 255)).max() <= 1
