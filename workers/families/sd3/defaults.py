"""What diffusers' pipeline takes where a request says nothing."""

from __future__ import annotations

from workers.engines.diffusion.family import Wishes

STEPS, GUIDANCE, STRENGTH = 28, 7.0, 0.6


def scale_of(wishes: Wishes) -> float:
    """Of guidance by a negative prompt, which is the empty one where a request has none; 1 and less: none."""
    return GUIDANCE if wishes.guidance_scale is None else wishes.guidance_scale
