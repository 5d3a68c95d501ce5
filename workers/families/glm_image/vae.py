"""GLM-Image's VAE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from adapters.chunk import Payload
from pipelines.options import DiffusionVaeOptions
from workers.engine import ItemError
from workers.engines.diffusion.family import Request, Vae
from workers.engines.diffusion.tensors import as_tensor
from workers.families.find import refuse
from workers.families.parts import Parts
from workers.families.pictures import as_pictures


class GlmImageVae(Vae):
    """Latents [channels, height, width] to pictures, and an edit's pictures to latents."""

    def __init__(self, model: str, options: DiffusionVaeOptions, device: str) -> None:
        super().__init__(model, options, device)
        refuse(options, "family_options")
        parts = Parts(model, device=device, dtype=options.dtype)
        self._vae = parts.module("vae")
        if options.encodes:
            from diffusers.image_processor import VaeImageProcessor
            from transformers import GlmImageProcessor

            self._pixels = VaeImageProcessor()
            self._seen = parts.plain("processor", GlmImageProcessor).image_processor

    def decode(self, items: Sequence[Payload]) -> list[Payload | Exception]:
        """One pass."""
        latents = torch.stack([as_tensor(item["latents"]) for item in items])
        latents = latents.to(self._vae.device, self._vae.dtype)
        mean, deviation = self._scale(latents)
        return as_pictures(self._vae.decode(latents * deviation + mean, return_dict=False)[0])

    def encode(self, requests: Sequence[Request]) -> list[Payload | Exception]:
        """{"latents": [float32 [channels, height, width], ...]}, one for each picture of a request."""
        return [
            {"latents": [self._encoded(image) for image in request.payload.get("images", [])]}
            for request in requests
        ]

    def _encoded(self, image: Any) -> torch.Tensor:
        """In the size that has 2 x 2 patches for each code that the language model sees of it.

        diffusers takes the picture's own size, and fails where that is another.
        """
        from PIL import Image
        from transformers.models.glm_image.image_processing_pil_glm_image import smart_resize

        picture = Image.fromarray(np.asarray(image))
        limits, factor = self._seen.size, self._seen.patch_size * self._seen.merge_size
        try:
            height, width = smart_resize(
                picture.height, picture.width, factor, limits["shortest_edge"], limits["longest_edge"]
            )
        except ValueError as error:
            raise ItemError(f"image: {error}", status=400, param="image") from None
        pixels = self._pixels.preprocess(picture, height=2 * height, width=2 * width)
        latents = self._vae.encode(pixels.to(self._vae.device, self._vae.dtype)).latent_dist.mode().float()
        mean, deviation = self._scale(latents)
        return ((latents - mean) / deviation)[0].cpu()

    def _scale(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of each channel."""
        config = self._vae.config
        mean, deviation = (
            torch.tensor(values).view(1, -1, 1, 1).to(like)
            for values in (config.latents_mean, config.latents_std)
        )
        return mean, deviation
