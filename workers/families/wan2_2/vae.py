"""Wan 2.2's VAE: latents to frames, and a first picture to latents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from adapters.chunk import Payload
from pipelines.options import DiffusionVaeOptions
from workers.engines.diffusion.family import Request, Vae
from workers.engines.diffusion.tensors import as_tensor
from workers.families.find import refuse
from workers.families.parts import Parts
from workers.families.pictures import as_pictures
from workers.families.wan2_2.form import Form


class FilmVae(Vae):
    """Latents [channels, frames, height, width] to {"frames", "fps"}."""

    def __init__(self, model: str, options: DiffusionVaeOptions, device: str) -> None:
        super().__init__(model, options, device)
        refuse(options, "family_options")
        from diffusers.video_processor import VideoProcessor

        parts = Parts(model, device=device, dtype=options.dtype)
        self._form = Form(parts)
        self._vae = parts.module("vae")
        self._pixels = VideoProcessor(vae_scale_factor=self._form.shrinks)

    def decode(self, items: Sequence[Payload]) -> list[Payload | Exception]:
        """One pass."""
        latents = torch.stack([as_tensor(item["latents"]) for item in items]).to(
            self._vae.device, self._vae.dtype
        )
        mean, deviation = self._scale(latents)
        films = self._vae.decode(latents * deviation + mean, return_dict=False)[0]
        return [_payload(film, item["fps"]) for film, item in zip(films, items, strict=True)]

    def encode(self, requests: Sequence[Request]) -> list[Payload | Exception]:
        """{"latents": float32 [channels, frames, height, width]} of the first frame, or of the whole film
        with the other frames black: see :meth:`workers.families.wan2_2.denoiser.Film._given`."""
        return [self._encoded(request) for request in requests]

    def _encoded(self, request: Request) -> Payload:
        from PIL import Image

        images = request.payload.get("images", [])
        self._form.check_pictures(len(images))
        shape = self._form.shape(request.wishes)
        picture = Image.fromarray(np.asarray(images[0]))
        first = self._pixels.preprocess(picture, height=shape.height, width=shape.width)[:, :, None]
        if self._form.appends:
            black = first.new_zeros(*first.shape[:2], shape.frames - 1, *first.shape[3:])
            first = torch.cat([first, black], 2)
        latents = self._vae.encode(first.to(self._vae.device, self._vae.dtype)).latent_dist.mode().float()
        mean, deviation = self._scale(latents)
        return {"latents": ((latents - mean) / deviation)[0].cpu()}

    def _scale(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of each channel."""
        config = self._vae.config
        mean, deviation = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(like)
            for values in (config.latents_mean, config.latents_std)
        )
        return mean, deviation


def _payload(film: torch.Tensor, fps: float) -> Payload | Exception:
    """Of a film [3, frames, height, width] between -1 and 1."""
    frames = []
    for frame in as_pictures(film.transpose(0, 1)):
        if isinstance(frame, Exception):
            return frame
        frames.append(frame["image"])
    return {"frames": np.stack(frames), "fps": fps}
