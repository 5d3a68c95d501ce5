"""GLM-Image's VAE."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adapters.chunk import Payload
from pipelines.options import DiffusionVaeOptions
from workers.engines.diffusion.family import Vae
from workers.engines.diffusion.tensors import as_tensor
from workers.families.find import refuse
from workers.families.parts import Parts
from workers.families.pictures import as_pictures


class GlmImageVae(Vae):
    """Latents [channels, height, width] to pictures."""

    def __init__(self, model: str, options: DiffusionVaeOptions, device: str) -> None:
        super().__init__(model, options, device)
        refuse(options, "family_options", "encodes")
        self._vae = Parts(model, device=device, dtype=options.dtype).module("vae")

    def decode(self, items: Sequence[Payload]) -> list[Payload | Exception]:
        """One pass."""
        config = self._vae.config
        latents = torch.stack([as_tensor(item["latents"]) for item in items])
        latents = latents.to(self._vae.device, self._vae.dtype)
        mean, deviation = (
            torch.tensor(values).view(1, -1, 1, 1).to(latents)
            for values in (config.latents_mean, config.latents_std)
        )
        return as_pictures(self._vae.decode(latents * deviation + mean, return_dict=False)[0])
