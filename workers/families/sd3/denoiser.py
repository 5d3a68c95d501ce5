"""SD3's transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from adapters.chunk import Payload
from pipelines.options import DiffusionOptions
from workers.engine import ItemError
from workers.engines.diffusion.family import (
    Canvas,
    Denoiser,
    Row,
    Wishes,
    conditions_of,
    latents_of,
    size_of,
    stacked,
    timesteps_of,
)
from workers.engines.diffusion.schedule import scheduler_for
from workers.engines.diffusion.tensors import noise
from workers.families.find import refuse
from workers.families.packed import shift_of
from workers.families.parts import Parts
from workers.families.sd3.defaults import STEPS, scale_of


class Sd3(Denoiser):
    """Latents [1, channels, height, width]."""

    def __init__(self, model: str, options: DiffusionOptions, device: str) -> None:
        super().__init__(model, options, device)
        refuse(options, "family_options")
        parts = Parts(model, device=device, dtype=options.dtype)
        self._transformer = parts.module("transformer")
        self.transformers = [self._transformer]
        self._template = parts.plain("scheduler")
        #: Pixels of a latent's edge.
        self._shrinks = 2 ** (len(parts.config("vae")["block_out_channels"]) - 1)

    def begin(self, inputs: Mapping[str, list[Payload]], wishes: Wishes, seed: int) -> Canvas:
        """Inputs: "text"."""
        config, device, dtype = self._transformer.config, self._transformer.device, self._transformer.dtype
        height, width = self._size(wishes)
        latents = noise((1, config.in_channels, height, width), seed, device, dtype)
        steps = wishes.num_inference_steps or STEPS
        return Canvas(
            latents,
            self._schedule(steps, height * width // config.patch_size**2),
            conditions_of(inputs["text"], device, dtype),
            scale_of(wishes),
        )

    def _size(self, wishes: Wishes) -> tuple[int, int]:
        """Height and width in latents. Raises ItemError (400)."""
        config = self._transformer.config
        patch = self._shrinks * config.patch_size
        pixels = size_of(wishes, default=config.sample_size * self._shrinks, multiple=patch)
        if max(pixels) > config.pos_embed_max_size * patch:
            raise ItemError(
                f"size: the model has places for {config.pos_embed_max_size * patch} pixels a side, "
                f"not for {max(pixels)}",
                status=400,
                param="size",
            )
        return pixels[0] // self._shrinks, pixels[1] // self._shrinks

    def _schedule(self, steps: int, patches: int) -> Any:
        shift = {}
        if self._template.config.get("use_dynamic_shifting"):
            shift["mu"] = shift_of(self._template.config, patches)
        return scheduler_for(
            self._template, device=self._transformer.device, num_inference_steps=steps, **shift
        )

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """[rows, channels, height, width]"""
        said: torch.Tensor = self._transformer(
            hidden_states=latents_of(rows),
            timestep=timesteps_of(rows),
            encoder_hidden_states=stacked(rows, "embeds"),
            pooled_projections=stacked(rows, "pooled"),
            return_dict=False,
        )[0]
        return said
