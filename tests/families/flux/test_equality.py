"""What the stages make of a request is what diffusers makes of it alone, on the same weights and seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families.diffusion_rig import (
    Asked,
    Painted,
    assert_resumes,
    assert_same,
    at_once,
    count_different,
    painted_together,
    reference,
    running,
)

SIZE = {"width": 64, "height": 48}

#: Requests that share nothing but their time: words, steps, guidance, seeds, sizes.
REQUESTS: list[Asked] = [
    ({"prompt": "a red ring"}, {**SIZE, "num_inference_steps": 4}, 1),
    ({"prompt": "a red ring"}, {**SIZE, "num_inference_steps": 4}, 2),  # the second picture of one call
    (
        {"prompt": "blue", "negative_prompt": "green"},
        {**SIZE, "num_inference_steps": 6, "guidance_scale": 1.5, "true_cfg_scale": 3.0},
        3,
    ),
    ({"prompt": "high"}, {"width": 48, "height": 64, "num_inference_steps": 3}, 4),  # as many patches
    ({"prompt": "one step"}, {**SIZE, "num_inference_steps": 1, "guidance_scale": 7.0}, 5),
    ({"prompt": "long " * 150}, {"width": 96, "height": 32, "num_inference_steps": 2}, 6),  # is cut
]

#: Whether there is a negative prompt, and which; the scales of guidance.
CELLS: list[Asked] = [
    ({"prompt": "a cup", **negative}, {**SIZE, "num_inference_steps": 2, **scales}, 1)
    for negative, scales in [
        ({}, {}),
        ({}, {"guidance_scale": 0.0}),
        ({}, {"guidance_scale": 1.0}),
        ({}, {"true_cfg_scale": 4.0}),
        ({"negative_prompt": ""}, {}),
        ({"negative_prompt": ""}, {"true_cfg_scale": 4.0}),
        ({"negative_prompt": " "}, {"true_cfg_scale": 4.0}),
        ({"negative_prompt": "dull"}, {"guidance_scale": 4.0}),
        ({"negative_prompt": "dull"}, {"true_cfg_scale": 1.0}),
        ({"negative_prompt": "dull"}, {"true_cfg_scale": 0.0}),
    ]
]


@pytest.fixture(scope="module")
def pipe(dev: Path) -> Any:
    """diffusers' own pipeline on the same weights."""
    from diffusers import FluxPipeline

    return FluxPipeline.from_pretrained(dev)


def check(painted: Painted, pipe: Any, asked: Asked, **call: Any) -> None:
    """Against diffusers, which packs latents: patches of 2 x 2, row by row."""
    request, params, seed = asked
    expected = reference(pipe, seed=seed, **request, **params, **call)
    channels, height, width = painted.latents.shape
    packed = painted.latents.reshape(channels, height // 2, 2, width // 2, 2).transpose(1, 3, 0, 2, 4)
    painted.made["denoiser"][-1]["latents"] = packed.reshape(expected.latents.shape)
    assert_same(painted, expected)


@pytest.mark.parametrize("cfg", ["batched", "sequential"])
async def test_unequal_requests_in_one_batch_are_what_each_is_alone(dev: Path, pipe: Any, cfg: str) -> None:
    settings = (f"denoiser.cfg={cfg}", "denoiser.max_batch_size=5")
    painted = await painted_together("flux", dev, REQUESTS, *settings)
    for one, asked in zip(painted, REQUESTS, strict=True):
        check(one, pipe, asked)


async def test_negative_prompts_and_scales_absent_and_empty_mean_what_they_mean_to_diffusers(
    dev: Path, pipe: Any
) -> None:
    async with running("flux", dev) as rig:
        painted = await at_once(*(rig.paint(request, seed=seed, **params) for request, params, seed in CELLS))
    for one, asked in zip(painted, CELLS, strict=True):
        check(one, pipe, asked)
    # Plain, three scales that the transformer is told, and one led away from an empty prompt.
    assert count_different(painted) == 5


async def test_a_model_that_is_told_no_scale_and_has_a_fixed_schedule(schnell: Path) -> None:
    from diffusers import FluxPipeline

    asked: Asked = ({"prompt": "a fast cat"}, {**SIZE, "num_inference_steps": 3, "guidance_scale": 9.0}, 1)
    async with running("flux", schnell) as rig:
        painted = await rig.paint(asked[0], seed=1, **asked[1])
    check(painted, FluxPipeline.from_pretrained(schnell), asked)


async def test_a_shorter_text_is_what_diffusers_makes_of_it(dev: Path, pipe: Any) -> None:
    asked: Asked = ({"prompt": "words " * 60}, {**SIZE, "num_inference_steps": 2}, 1)
    async with running("flux", dev, "text.family_options={max_sequence_length: 100}") as rig:
        painted = await rig.paint(asked[0], seed=1, **asked[1])
    assert painted.made["text"][0]["embeds"].shape[0] == 100
    check(painted, pipe, asked, max_sequence_length=100)


async def test_a_killed_denoiser_goes_on_where_it_was(dev: Path) -> None:
    request = {"prompt": "a vase", "negative_prompt": "a jar"}
    params = {**SIZE, "num_inference_steps": 7, "true_cfg_scale": 2.0, "partial_images": 2}
    kill_after = int(np.random.default_rng(5).integers(1, 6))  # checkpoints, one a step
    await assert_resumes("flux", dev, (request, params, 9), kill_after=kill_after)


async def test_a_size_that_cannot_be_cut_into_patches_is_refused(dev: Path) -> None:
    from workers.engine import ItemError

    async with running("flux", dev) as rig:
        with pytest.raises(ItemError, match="no multiple of 16") as refused:
            await rig.paint({"prompt": "a cup"}, width=64, height=56)
    assert (refused.value.status, refused.value.param) == (400, "size")
