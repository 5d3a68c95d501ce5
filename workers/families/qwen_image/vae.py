"""Qwen-Image's VAE, made for films: a picture is a film of one frame."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from adapters.chunk import Payload
from pipelines.options import DiffusionVaeOptions
from workers.engines.diffusion.family import Request, Vae
from workers.engines.diffusion.tensors import as_tensor
from workers.families.find import refuse
from workers.families.packed import pack
from workers.families.parts import Parts
from workers.families.pictures import as_pictures
from workers.families.qwen_image.form import Form, QwenImageWishes, fitted


class QwenImageVae(Vae):
    """Latents [channels, height, width] to pictures; and an edit's pictures to latents."""

    wishes = QwenImageWishes

    def __init__(self, model: str, options: DiffusionVaeOptions, device: str) -> None:
        super().__init__(model, options, device)
        parts = Parts(model, device=device, dtype=options.dtype)
        self._form = Form(parts)
        if options.encodes:
            self._area = self._form.area(options)
        else:
            refuse(options, "family_options")
        self._vae = parts.module("vae")

    def decode(self, items: Sequence[Payload]) -> list[Payload | Exception]:
        """One pass."""
        latents = torch.stack([as_tensor(item["latents"]) for item in items])[:, :, None]
        latents = latents.to(self._vae.device, self._vae.dtype)
        mean, deviation = self._scale(latents)
        return as_pictures(self._vae.decode(latents * deviation + mean, return_dict=False)[0][:, :, 0])

    def encode(self, requests: Sequence[Request]) -> list[Payload | Exception]:
        """{"latents": float32 [patches of all pictures, channels x 4], "sizes": [[height, width]]} each, the
        sizes in latents."""
        return [self._encoded(request) for request in requests]

    def _encoded(self, request: Request) -> Payload:
        latents = [self._latents(image) for image in self._form.pictures(request)]
        return {
            "latents": torch.cat([pack(each)[0] for each in latents]).float().cpu(),
            "sizes": [list(each.shape[2:]) for each in latents],
        }

    def _latents(self, image: object) -> torch.Tensor:
        """Of a picture uint8 [height, width, 3]: [1, channels, height, width]."""
        levels = torch.from_numpy(np.array(fitted(image, self._area)))
        pixels = (levels.float() / 255 * 2 - 1).permute(2, 0, 1)[None, :, None]
        latents = self._vae.encode(pixels.to(self._vae.device, self._vae.dtype)).latent_dist.mode()
        mean, deviation = self._scale(latents)
        scaled: torch.Tensor = (latents - mean) / deviation
        return scaled[:, :, 0]

    def _scale(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of each channel."""
        config = self._vae.config
        mean, deviation = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(like)
            for values in (config.latents_mean, config.latents_std)
        )
        return mean, deviation
