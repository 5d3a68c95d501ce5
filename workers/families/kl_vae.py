"""The VAE of FLUX and SD3: diffusers' AutoencoderKL."""

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


class KlVae(Vae):
    """Latents [channels, height, width] to pictures 8 times as high and wide."""

    def __init__(self, model: str, options: DiffusionVaeOptions, device: str) -> None:
        super().__init__(model, options, device)
        refuse(options, "family_options")
        self._vae = Parts(model, device=device, dtype=options.dtype).module("vae")

    def decode(self, items: Sequence[Payload]) -> list[Payload | Exception]:
        """One pass."""
        config = self._vae.config
        latents = torch.stack([as_tensor(item["latents"]) for item in items])
        latents = latents.to(self._vae.device, self._vae.dtype) / config.scaling_factor
        return as_pictures(self._vae.decode(latents + (config.shift_factor or 0.0), return_dict=False)[0])
