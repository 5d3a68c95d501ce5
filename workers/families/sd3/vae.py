"""SD3's VAE; it also encodes a picture that is to be changed, and where a mask says that it may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from adapters.chunk import Payload
from pipelines.options import DiffusionVaeOptions
from workers.engine import ItemError
from workers.engines.diffusion.family import Request, Wishes, size_of
from workers.families.kl_vae import KlVae
from workers.families.parts import Parts


class Sd3Vae(KlVae):
    """Latents [channels, height, width] to pictures, and back."""

    def __init__(self, model: str, options: DiffusionVaeOptions, device: str) -> None:
        super().__init__(model, options, device)
        transformer = Parts(model, device=device).config("transformer")
        shrinks = 2 ** (len(self._vae.config.block_out_channels) - 1)
        self._multiple = shrinks * transformer["patch_size"]
        self._default = shrinks * transformer["sample_size"]

    def encode(self, requests: Sequence[Request]) -> list[Payload | Exception]:
        """{"latents": float32 [channels, height, width], perhaps "mask": float32 [1, height, width]} each.

        The mask is 1 where the picture may change. The VAE's latents are a distribution, and a sample of it
        is drawn from the seed.
        """
        return [self._encoded(request) for request in requests]

    def _encoded(self, request: Request) -> Payload:
        from PIL import Image

        images = request.payload.get("images", ())
        if len(images) != 1:
            raise ItemError(
                f"image: this model changes one picture, got {len(images)}", status=400, param="image"
            )
        height, width = self._size(images[0], request.wishes)
        levels = _resized(Image.fromarray(np.asarray(images[0])), height, width)
        pixels = torch.from_numpy(levels).permute(2, 0, 1)[None] * 2 - 1
        spread = self._vae.encode(pixels.to(self._vae.device, self._vae.dtype)).latent_dist
        latents = spread.sample(torch.Generator("cpu").manual_seed(request.seed))
        config = self._vae.config
        made: Payload = {
            "latents": ((latents - config.shift_factor) * config.scaling_factor)[0].float().cpu()
        }
        if "mask" in request.payload:
            levels = _resized(Image.fromarray(np.asarray(request.payload["mask"])), height, width)
            mask = torch.from_numpy(levels >= 0.5)[None, None].float()
            made["mask"] = torch.nn.functional.interpolate(mask, size=latents.shape[2:])[0]
        return made

    def _size(self, image: Any, wishes: Wishes) -> tuple[int, int]:
        """(height, width) in pixels: as asked for, else the picture's own.

        Then it has at most as many pixels as the model draws by default, and edges that the model can have.
        """
        height, width = size_of(wishes, default=self._default, multiple=self._multiple)
        if wishes.height or wishes.width:
            return height, width
        height, width = image.shape[:2]
        scale = min(1.0, self._default / math.sqrt(height * width))
        rows, columns = (max(round(edge * scale / self._multiple), 1) for edge in (height, width))
        return rows * self._multiple, columns * self._multiple


def _resized(image: Any, height: int, width: int) -> Any:
    """A PIL image as float32 [height, width] or [height, width, 3], 0 to 1; resized as diffusers does it."""
    from PIL import Image

    resized = image.resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(resized, dtype=np.float32) / 255
