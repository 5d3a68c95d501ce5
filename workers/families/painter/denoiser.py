"""The painter's denoiser: a small transformer of SD3's kind, led by a language model's states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from adapters.chunk import Payload
from workers.engine import ItemError
from workers.engines.diffusion.family import (
    Canvas,
    Row,
    Wishes,
    conditions_of,
)
from workers.engines.diffusion.schedule import scheduler_for
from workers.engines.diffusion.tensors import noise
from workers.families.one_transformer import OneTransformer
from workers.families.painter.wishes import SIZE, STEPS, PainterWishes
from workers.families.sd3.passes import said_by


class Painter(OneTransformer):
    """Latents [1, channels, height, width]."""

    wishes = PainterWishes

    def begin(self, inputs: Mapping[str, list[Payload]], wishes: Wishes, seed: int) -> Canvas:
        """Inputs: "thinker"."""
        assert isinstance(wishes, PainterWishes)
        for name, pixels in (("width", wishes.width), ("height", wishes.height)):
            if pixels not in (None, SIZE):
                raise ItemError(
                    f"size: the {name} is {pixels}; the painter paints {SIZE} x {SIZE} pixels",
                    status=400,
                    param="size",
                )
        device, dtype = self._transformer.device, self._transformer.dtype
        config = self._transformer.config
        return Canvas(
            noise((1, config.in_channels, config.sample_size, config.sample_size), seed, device, dtype),
            scheduler_for(
                self._template, device=device, num_inference_steps=wishes.num_inference_steps or STEPS
            ),
            conditions_of(inputs["thinker"], device, dtype),
            wishes.guidance,
        )

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """[rows, channels, height, width]"""
        return said_by(self._transformer, rows)
