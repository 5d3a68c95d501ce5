"""What a request may ask of GLM-Image, and what stages must agree about."""

from __future__ import annotations

from workers.engines.diffusion.family import Wishes, size_of

#: What diffusers' pipeline takes where it is told nothing.
SIZE, STEPS, GUIDANCE = 1024, 50, 1.5
CODE = 32  #: pixels of a code's edge


def picture_size(wishes: Wishes) -> tuple[int, int]:
    """(height, width) in pixels. Raises ItemError (400)."""
    return size_of(wishes, default=SIZE, multiple=CODE)


def guided(wishes: Wishes) -> bool:
    """Whether there is a second branch."""
    return (GUIDANCE if wishes.guidance_scale is None else wishes.guidance_scale) > 1
