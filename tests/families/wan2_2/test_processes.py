"""Real processes, of which the denoiser's is killed half-way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.families.diffusion_rig import Painted, Reference, assert_same, reference
from tests.families.heard import Houses
from tests.families.killed import with_a_kill

REQUEST = {"prompt": "a cat", "negative_prompt": "a dog"}
#: The first picture on the way comes before half of the steps, where the denoiser waits.
PARAMS = {"width": 64, "height": 32, "num_frames": 9, "num_inference_steps": 120}


@pytest.fixture(scope="session")
def theirs(made: Callable[[Any], Path]) -> Reference:
    """diffusers' film."""
    from diffusers import WanPipeline

    return reference(WanPipeline.from_pretrained(made("t2v")), seed=7, **REQUEST, **PARAMS)


async def test_a_film_whose_denoiser_is_killed_is_that_of_diffusers(
    house: Houses, made: Callable[[Any], Path], theirs: Reference
) -> None:
    # Nobody brings a picture, so nobody waits for those who would look at it.
    asked = (REQUEST, {**PARAMS, "partial_images": 3}, 7)
    films = await with_a_kill(house, "wan2_2", made("t2v"), asked, "picture.replicas=0", output="frames")
    ours = Painted({"denoiser": [{"latents": theirs.latents}], "vae": [films[-1]]})
    assert_same(ours, theirs)  # the frames; latents stay between the stages
