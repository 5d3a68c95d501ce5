"""What denoisers with a single transformer have in common: how they are loaded."""

from __future__ import annotations

from abc import ABC
from functools import cached_property

from pipelines.options import DiffusionOptions
from workers.engines.diffusion.family import Denoiser
from workers.families.find import refuse
from workers.families.parts import Parts


class OneTransformer(Denoiser, ABC):
    """A denoiser of a folder in diffusers' layout: "transformer", and "scheduler" as each canvas copies it.

    It takes no ``family_options``.
    """

    def __init__(self, model: str, options: DiffusionOptions, device: str) -> None:
        super().__init__(model, options, device)
        refuse(options, "family_options")
        self._parts = Parts(model, device=device, dtype=options.dtype)
        self._transformer = self._parts.module("transformer")
        self.transformers = [self._transformer]
        self._template = self._parts.plain("scheduler")

    @cached_property
    def _shrinks(self) -> int:
        """Pixels of a latent's edge, by the VAE's settings."""
        return int(2 ** (len(self._parts.config("vae")["block_out_channels"]) - 1))
