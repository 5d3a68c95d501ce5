"""What the stages make of a request is what diffusers makes of it alone, on the same weights and seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.families.diffusion_rig import Asked, assert_same, at_once, painted_together, reference, running

#: Requests that share nothing but their time: words, steps, guidance, seeds, sizes.
REQUESTS: list[Asked] = [
    ({"prompt": "a red ring"}, {"num_inference_steps": 4}, 1),
    ({"prompt": "a red ring"}, {"num_inference_steps": 4}, 2),  # the second picture of one call
    ({"prompt": "blue", "negative_prompt": "green"}, {"num_inference_steps": 6, "guidance_scale": 3.0}, 3),
    ({"prompt": "no guide", "negative_prompt": "idle"}, {"num_inference_steps": 3, "guidance_scale": 1.0}, 4),
    ({"prompt": "wide"}, {"num_inference_steps": 2, "width": 96, "height": 48}, 5),
    ({"prompt": "one step"}, {"num_inference_steps": 1}, 6),
]


@pytest.mark.parametrize("cfg", ["batched", "sequential"])
async def test_unequal_requests_in_one_batch_are_what_each_is_alone(
    checkpoint: Path, pipe: Any, cfg: str
) -> None:
    settings = (f"denoiser.cfg={cfg}", "denoiser.max_batch_size=5")
    painted = await painted_together("sd3", checkpoint, REQUESTS, *settings)
    for one, (request, params, seed) in zip(painted, REQUESTS, strict=True):
        assert_same(one, reference(pipe, seed=seed, **request, **params))


#: Whether there is a negative prompt, and which; the scale of guidance, or none.
CELLS = [
    ({}, {}),
    ({}, {"guidance_scale": 0.0}),
    ({}, {"guidance_scale": 1.0}),
    ({"negative_prompt": ""}, {}),
    ({"negative_prompt": ""}, {"guidance_scale": 4.0}),
    ({"negative_prompt": " "}, {"guidance_scale": 4.0}),
    ({"negative_prompt": "dull"}, {}),
    ({"negative_prompt": "dull"}, {"guidance_scale": 0.0}),
]


async def test_absent_and_empty_negative_prompts_and_scales_mean_what_they_mean_to_diffusers(
    checkpoint: Path, pipe: Any
) -> None:
    async with running("sd3", checkpoint) as rig:
        painted = await at_once(
            *(rig.paint({"prompt": "a cup", **n}, num_inference_steps=2, **scale) for n, scale in CELLS)
        )
    for one, (negative, scale) in zip(painted, CELLS, strict=True):
        assert_same(one, reference(pipe, prompt="a cup", num_inference_steps=2, **negative, **scale))
