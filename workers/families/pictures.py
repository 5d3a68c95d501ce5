"""Pixels as VAEs know them, from -1 to 1, and as pictures have them."""

from __future__ import annotations

import torch

from adapters.chunk import Payload
from workers.engine import ItemError


def as_pictures(pixels: torch.Tensor) -> list[Payload | Exception]:
    """Floats [n, 3, height, width] -> {"image": uint8 [height, width, 3]} each.

    What is not finite is an ItemError in its place: in whole numbers it would pass for a black picture.
    """
    finite = pixels.isfinite().flatten(1).all(1).tolist()
    # Rounded as diffusers does it: in float32, after a clamp.
    levels = (pixels * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float().mul(255).round()
    images = levels.nan_to_num().to(torch.uint8).cpu().numpy()
    return [
        {"image": image} if good else ItemError("the decoded picture is not finite")
        for image, good in zip(images, finite, strict=True)
    ]
