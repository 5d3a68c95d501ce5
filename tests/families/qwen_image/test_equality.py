"""What the stages make of a request is what diffusers makes of it alone, on the same weights and seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families.diffusion_rig import (
    Asked,
    assert_resumes,
    at_once,
    count_different,
    painted_together,
    running,
)
from tests.families.qwen_image.compare import check

SIZE = {"width": 64, "height": 48}

#: Requests that share nothing but their time: words and how many, steps, guidance, seeds, sizes.
REQUESTS: list[Asked] = [
    ({"prompt": "a red ring"}, {**SIZE, "num_inference_steps": 4}, 1),
    ({"prompt": "a red ring"}, {**SIZE, "num_inference_steps": 4}, 2),  # the second picture of one call
    (
        {"prompt": "blue", "negative_prompt": "a much longer prompt than the other one"},
        {**SIZE, "num_inference_steps": 6, "guidance_scale": 2.5},
        3,
    ),
    ({"prompt": "high", "negative_prompt": ""}, {"width": 48, "height": 64, "num_inference_steps": 3}, 4),
    (
        {"prompt": "no guide", "negative_prompt": "idle"},
        {**SIZE, "num_inference_steps": 2, "guidance_scale": 1},
        5,
    ),
    ({"prompt": "long " * 150}, {**SIZE, "num_inference_steps": 2}, 6),  # is cut
    ({"prompt": "{curly} <|image_pad|>\n words"}, {"width": 96, "height": 32, "num_inference_steps": 3}, 7),
]

#: Whether there is a negative prompt, and which; the scale of guidance, or none.
CELLS: list[Asked] = [
    ({"prompt": "a cup", **negative}, {**SIZE, "num_inference_steps": 2, **scale}, 1)
    for negative, scale in [
        ({}, {}),
        ({}, {"guidance_scale": 4.0}),
        ({"negative_prompt": ""}, {}),
        ({"negative_prompt": ""}, {"guidance_scale": 4.0}),
        ({"negative_prompt": " "}, {"guidance_scale": 4.0}),
        ({"negative_prompt": "dull"}, {"guidance_scale": 1.0}),
        ({"negative_prompt": "dull"}, {"guidance_scale": 0.0}),
        ({"negative_prompt": "dull"}, {"true_cfg_scale": 3.0}),
    ]
]


@pytest.mark.parametrize("cfg", ["batched", "sequential"])
async def test_unequal_requests_in_one_batch_are_what_each_is_alone(draws: Path, pipe: Any, cfg: str) -> None:
    settings = (f"denoiser.cfg={cfg}", "denoiser.max_batch_size=5")
    painted = await painted_together("qwen_image", draws, REQUESTS, *settings)
    for one, asked in zip(painted, REQUESTS, strict=True):
        check(one, pipe, asked)


async def test_negative_prompts_and_scales_absent_and_empty_mean_what_they_mean_to_diffusers(
    draws: Path, pipe: Any
) -> None:
    async with running("qwen_image", draws) as rig:
        painted = await at_once(*(rig.paint(request, seed=seed, **params) for request, params, seed in CELLS))
    for one, asked in zip(painted, CELLS, strict=True):
        check(one, pipe, asked)
    # Plain, and led away from an empty prompt, from a space and from a word.
    assert count_different(painted) == 4


async def test_one_step_is_a_step_though_diffusers_divides_zero_by_zero(draws: Path, pipe: Any) -> None:
    async with running("qwen_image", draws) as rig:
        painted = await rig.paint({"prompt": "one step"}, seed=3, num_inference_steps=1, **SIZE)
    terminal = pipe.scheduler
    pipe.scheduler = type(terminal).from_config(terminal.config, shift_terminal=None)
    try:
        check(painted, pipe, ({"prompt": "one step"}, {**SIZE, "num_inference_steps": 1}, 3))
    finally:
        pipe.scheduler = terminal


async def test_a_killed_denoiser_goes_on_where_it_was(draws: Path) -> None:
    request = {"prompt": "a vase", "negative_prompt": "a jar of glass"}
    params = {**SIZE, "num_inference_steps": 7, "partial_images": 2}
    kill_after = int(np.random.default_rng(6).integers(1, 6))  # checkpoints, one a step
    await assert_resumes("qwen_image", draws, (request, params, 9), kill_after=kill_after)
