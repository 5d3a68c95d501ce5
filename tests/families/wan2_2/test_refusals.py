"""What a checkpoint can't do is refused by the name of the field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families.diffusion_rig import Rig, running
from tests.families.wan2_2.test_equality import PICTURE, SMALL, film
from workers.engine import ItemError


async def refused(rig: Rig, request: dict[str, Any], params: dict[str, Any]) -> str | None:
    """The field that a 400 names."""
    with pytest.raises(ItemError) as caught:
        await film(rig, request, {**SMALL, **params}, 1)
    assert caught.value.status == 400
    return caught.value.param


async def test_what_a_film_can_not_be_is_named(made: Callable[[Any], Path]) -> None:
    request = {"prompt": "a cat"}
    async with running("wan2_2", made("ti2v")) as rig:
        assert await refused(rig, request, {"num_frames": 6}) == "num_frames"
        assert await refused(rig, request, {"num_inference_steps": 0}) == "num_inference_steps"
        assert await refused(rig, request, {"width": 48}) == "size"
        assert await refused(rig, request, {"guidance_scale_2": 2.0}) == "guidance_scale_2"
        # What no file can have: told before the film is made.
        assert await refused(rig, request, {"fps": 4e-4}) == "fps"
        assert await refused(rig, request, {"fps": 1e4}) == "fps"
        two = {**request, "images": [PICTURE, PICTURE]}
        assert await refused(rig, two, {}) == "input_reference"


async def test_a_picture_is_refused_by_a_model_of_text_and_missed_by_one_of_pictures(
    made: Callable[[Any], Path],
) -> None:
    async with running("wan2_2", made("t2v")) as rig:
        assert await refused(rig, {"prompt": "a", "images": [PICTURE]}, {}) == "input_reference"
    async with running("wan2_2", made("i2v"), stages=["text", "denoiser", "vae"]) as rig:
        assert await refused(rig, {"prompt": "a"}, {}) == "input_reference"


async def test_frames_that_are_not_finite_fail_and_do_not_become_black(made: Callable[[Any], Path]) -> None:
    async with running("wan2_2", made("ti2v"), stages=["vae"]) as rig:
        latents = np.full((6, 2, 2, 2), np.nan, np.float32)
        with pytest.raises(ItemError, match="not finite"):
            await rig.stage("vae", {"denoiser": [{"latents": latents, "fps": 24.0}]}, 1, {})


async def test_the_speed_of_a_film_is_the_callers_or_the_models(made: Callable[[Any], Path]) -> None:
    request, params = {"prompt": "a"}, {**SMALL, "num_inference_steps": 1}
    async with running("wan2_2", made("t2v")) as rig:
        usual = await film(rig, request, params, 1)
        slow = await film(rig, request, {**params, "fps": 8.0}, 1)
    assert usual.made["vae"][-1]["fps"] == 16.0
    assert slow.made["vae"][-1]["fps"] == 8.0
