"""FLUX's transformer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from adapters.chunk import Payload
from workers.engines.diffusion.family import (
    Canvas,
    Row,
    Wishes,
    conditions_of,
    latents_of,
    size_of,
    stacked,
    timesteps_of,
)
from workers.engines.diffusion.tensors import noise
from workers.families.flux.wishes import GUIDANCE, SIZE, STEPS, FluxWishes
from workers.families.one_transformer import OneTransformer
from workers.families.packed import pack, shifted, unpack


class Flux(OneTransformer):
    """Latents are packed: [1, patches, channels x 4]."""

    wishes = FluxWishes

    def begin(self, inputs: Mapping[str, list[Payload]], wishes: Wishes, seed: int) -> Canvas:
        """Inputs: "text"."""
        assert isinstance(wishes, FluxWishes)
        height, width = (
            pixels // self._shrinks for pixels in size_of(wishes, default=SIZE, multiple=self._shrinks * 2)
        )
        device, dtype = self._transformer.device, self._transformer.dtype
        channels = self._transformer.config.in_channels // 4
        latents = pack(noise((1, channels, height, width), seed, device, dtype))
        return Canvas(
            latents,
            shifted(self._template, wishes.num_inference_steps or STEPS, latents.shape[1], device),
            conditions_of(inputs["text"], device, dtype),
            wishes.cfg,
            extras={
                "size": (height, width),
                "places": _places(height, width).to(latents),
                "scale": GUIDANCE if wishes.guidance_scale is None else wishes.guidance_scale,
            },
        )

    def key(self, row: Row) -> Hashable:
        """As many patches may be cut from pictures of different shapes."""
        return super().key(row), row.canvas.extras["size"]

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """[rows, patches, channels x 4]"""
        latents, embeds = latents_of(rows), stacked(rows, "embeds")
        guidance = None
        if self._transformer.config.guidance_embeds:
            guidance = torch.tensor([row.canvas.extras["scale"] for row in rows], device=latents.device)
        said: torch.Tensor = self._transformer(
            hidden_states=latents,
            timestep=timesteps_of(rows).to(latents.dtype) / 1000,
            guidance=guidance,
            pooled_projections=stacked(rows, "pooled"),
            encoder_hidden_states=embeds,
            txt_ids=latents.new_zeros(embeds.shape[1], 3),
            img_ids=rows[0].canvas.extras["places"],
            return_dict=False,
        )[0]
        return said

    def picture(self, canvas: Canvas, latents: torch.Tensor) -> Payload:
        """Unpacked, float32 [channels, height, width]."""
        return super().picture(canvas, unpack(latents, *canvas.extras["size"]))


def _places(height: int, width: int) -> torch.Tensor:
    """Of each patch: 0, its row and its column, [patches, 3]."""
    rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1)
