"""What a transformer of SD3's kind is asked in a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workers.engines.diffusion.family import Row, latents_of, stacked, timesteps_of


def said_by(transformer: Any, rows: Sequence[Row]) -> torch.Tensor:
    """Of rows with the conditions "embeds" and "pooled": [rows, channels, height, width]."""
    said: torch.Tensor = transformer(
        hidden_states=latents_of(rows),
        timestep=timesteps_of(rows),
        encoder_hidden_states=stacked(rows, "embeds"),
        pooled_projections=stacked(rows, "pooled"),
        return_dict=False,
    )[0]
    return said
