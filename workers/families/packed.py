"""Latents as a row of patches, and a schedule that depends on how many there are: FLUX and Qwen-Image."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from workers.engines.diffusion.schedule import scheduler_for


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[n, channels, height, width] -> [n, height / 2 x width / 2, channels x 4]: patches, row by row."""
    number, channels, height, width = latents.shape
    patches = latents.reshape(number, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(number, height // 2 * (width // 2), channels * 4)


def unpack(patches: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The reverse; ``height`` and ``width`` are those of the latents."""
    number, _, size = patches.shape
    latents = patches.reshape(number, height // 2, width // 2, size // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return latents.reshape(number, size // 4, height, width)


def shift_of(config: Any, patches: int) -> float:
    """``mu``: a schedule is shifted towards noise the more the larger a picture is.

    It lies on a line through two points that the scheduler's configuration gives (Esser et al. 2024, section
    5.3.2).
    """
    few, many = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (high - low) / (many - few)
    return float(patches * slope + (low - slope * few))


def shifted(template: Any, steps: int, patches: int, device: Any) -> Any:
    """A scheduler of its own for ``steps`` steps over ``patches`` patches.

    Its noise levels go from 1 to 1 / steps, and are shifted by :func:`shift_of`.
    """
    mu = shift_of(template.config, patches)
    if template.config.get("use_flow_sigmas"):  # the scheduler makes its own
        return scheduler_for(template, device=device, num_inference_steps=steps, mu=mu)
    return scheduler_for(template, device=device, sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
