"""What the stages make of a request is what diffusers makes of it alone, on the same weights and seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families.diffusion_rig import Painted, Reference, Rig, assert_same, at_once, reference, running
from tests.families.wan2_2.conftest import Case

SMALL = {"width": 64, "height": 32, "num_frames": 9}
#: Requests that share nothing but their time: words, sizes, lengths, steps, guidance, seeds.
REQUESTS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"prompt": "a cat"}, {**SMALL, "num_inference_steps": 5}, 1),
    ({"prompt": "a cat"}, {**SMALL, "num_inference_steps": 3, "guidance_scale": 1.0}, 2),
    ({"prompt": " fox &amp;  dog", "negative_prompt": ""}, {**SMALL, "num_inference_steps": 2}, 3),
    (
        {"prompt": "high", "negative_prompt": "wide"},
        {"width": 32, "height": 64, "num_frames": 5, "num_inference_steps": 1, "guidance_scale": 7.0},
        4,
    ),
]
#: For the two transformers of A14B a scale each.
TWO_SCALES = ({"prompt": "b"}, {**SMALL, "num_inference_steps": 4, "guidance_scale_2": 2.0}, 5)

PICTURE = np.random.default_rng(0).integers(0, 255, (40, 70, 3), dtype=np.uint8)


def expected(pipe: Any, request: dict[str, Any], params: dict[str, Any], seed: int) -> Reference:
    """diffusers' film, with the picture where there is one."""
    from PIL import Image

    call = {name: value for name, value in request.items() if name != "images"}
    if "images" in request:
        call["image"] = Image.fromarray(request["images"][0])
    return reference(pipe, seed=seed, **call, **params)


async def film(rig: Rig, request: dict[str, Any], params: dict[str, Any], seed: int) -> Painted:
    """Ours."""
    return await rig.paint(request, seed=seed, has=["image"] if "images" in request else [], **params)


async def test_unequal_requests_in_one_batch_are_what_each_is_alone(case: Case) -> None:
    pipe = case.pipe()
    requests = [*REQUESTS, TWO_SCALES] if pipe.config.boundary_ratio else REQUESTS
    if case.pictures:
        requests = [({**request, "images": [PICTURE]}, *rest) for request, *rest in requests]
    async with running("wan2_2", case.checkpoint, "denoiser.max_num_seqs=8") as rig:
        films = await at_once(*(film(rig, *one) for one in requests))
    for ours, one in zip(films, requests, strict=True):
        theirs = expected(pipe, *one)
        latents = theirs.latents
        if case.pictures and pipe.config.expand_timesteps:
            # diffusers puts the given frame back after its last step; the pixels show that it is the same.
            latents = np.concatenate([ours.latents[:, :1], latents[:, 1:]], 1)
        assert_same(ours, theirs, latents=latents)


@pytest.mark.parametrize("form", ["t2v", "i2v"])
async def test_a_film_whose_denoiser_dies_between_its_transformers_is_the_same(
    made: Callable[[Any], Path], form: str
) -> None:
    request = {"prompt": "a cat", **({"images": [PICTURE]} if form == "i2v" else {})}
    params = {**SMALL, "num_inference_steps": 6}
    async with running("wan2_2", made(form), "denoiser.checkpoint_steps=1") as rig:
        whole = await film(rig, request, params, 1)
        for steps in (2, 4):  # the first transformer made two of them
            again = await rig.broken(
                "denoiser", whole.made, 1, params, when=lambda _, states, n=steps: len(states) == n
            )
            np.testing.assert_array_equal(again[-1]["latents"], whole.latents)
