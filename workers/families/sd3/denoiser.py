"""SD3's transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from adapters.chunk import Payload
from workers.engine import ItemError
from workers.engines.diffusion.family import (
    Canvas,
    Row,
    Wishes,
    conditions_of,
    size_of,
)
from workers.engines.diffusion.schedule import scheduler_for
from workers.engines.diffusion.tensors import as_tensor, noise
from workers.families.one_transformer import OneTransformer
from workers.families.packed import shift_of
from workers.families.sd3.defaults import STEPS, STRENGTH, scale_of
from workers.families.sd3.passes import said_by


class Sd3(OneTransformer):
    """Latents [1, channels, height, width]."""

    def begin(self, inputs: Mapping[str, list[Payload]], wishes: Wishes, seed: int) -> Canvas:
        """Inputs: "text", and "picture" where one is to be changed."""
        config, device, dtype = self._transformer.config, self._transformer.device, self._transformer.dtype
        given = next(iter(inputs.get("picture", ())), None)
        height, width = self._size(wishes) if given is None else given["latents"].shape[1:]
        self._check(height, width)
        shape = (1, config.in_channels, height, width)
        steps = wishes.num_inference_steps or STEPS
        canvas = Canvas(
            # The first draw of an edit's seed is the sample of the VAE's distribution.
            noise(shape, seed, device, dtype, skip=0 if given is None else 1),
            self._schedule(steps, height * width // config.patch_size**2),
            conditions_of(inputs["text"], device, dtype),
            scale_of(wishes),
        )
        if given is not None:
            self._begin_from(canvas, given, STRENGTH if wishes.strength is None else wishes.strength)
        return canvas

    def _begin_from(self, canvas: Canvas, given: Payload, strength: float) -> None:
        """Leaves out the first steps: what they would make is the picture with noise (SDEdit, Meng 2022)."""
        kept = {name: as_tensor(value)[None].to(canvas.latents) for name, value in given.items()}
        canvas.extras = {"noise": canvas.latents, **kept}
        # At least the last step is taken: as numbers, 4 - 4e-17 is 4.
        canvas.step = min(int(canvas.steps - canvas.steps * strength), canvas.steps - 1)
        canvas.scheduler.set_begin_index(canvas.step)
        canvas.latents = _noised(canvas)

    def advance(self, canvas: Canvas, guided: torch.Tensor) -> None:
        """What the mask leaves out is the given picture again after each step, as noisy as the rest."""
        step = canvas.step
        super().advance(canvas, guided)
        if "mask" in canvas.extras:
            mask = canvas.extras["mask"]
            canvas.latents = (1 - mask) * _noised(canvas, step + 1) + mask * canvas.latents

    def _size(self, wishes: Wishes) -> tuple[int, int]:
        """Height and width in latents. Raises ItemError (400)."""
        config = self._transformer.config
        patch = self._shrinks * config.patch_size
        height, width = size_of(wishes, default=config.sample_size * self._shrinks, multiple=patch)
        return height // self._shrinks, width // self._shrinks

    def _check(self, height: int, width: int) -> None:
        config = self._transformer.config
        if max(height, width) > config.pos_embed_max_size * config.patch_size:
            most = config.pos_embed_max_size * config.patch_size * self._shrinks
            raise ItemError(
                f"size: the model has places for {most} pixels a side, "
                f"not for {max(height, width) * self._shrinks}",
                status=400,
                param="size",
            )

    def _schedule(self, steps: int, patches: int) -> Any:
        shift = {}
        if self._template.config.get("use_dynamic_shifting"):
            shift["mu"] = shift_of(self._template.config, patches)
        return scheduler_for(
            self._template, device=self._transformer.device, num_inference_steps=steps, **shift
        )

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """[rows, channels, height, width]"""
        return said_by(self._transformer, rows)


def _noised(canvas: Canvas, step: int | None = None) -> torch.Tensor:
    """The given picture as noisy as the latents are before a step, by default the next one."""
    level = canvas.scheduler.sigmas[canvas.step if step is None else step].to(canvas.latents)
    noised: torch.Tensor = level * canvas.extras["noise"] + (1 - level) * canvas.extras["latents"]
    return noised
