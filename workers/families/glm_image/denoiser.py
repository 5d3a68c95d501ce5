"""GLM-Image's diffusion transformer."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from adapters.chunk import Payload
from pipelines.options import DiffusionOptions
from workers.engine import ItemError
from workers.engines.diffusion.family import (
    POSITIVE,
    Canvas,
    Row,
    Wishes,
    conditions_of,
    latents_of,
    stacked,
    timesteps_of,
)
from workers.engines.diffusion.schedule import scheduler_for
from workers.engines.diffusion.tensors import as_tensor, noise
from workers.families.glm_image.sight import doubled
from workers.families.glm_image.wishes import CODE, GUIDANCE, STEPS
from workers.families.one_transformer import OneTransformer


class GlmImage(OneTransformer):
    """Latents [1, channels, height, width]. The negative branch draws without the codes."""

    def __init__(self, model: str, options: DiffusionOptions, device: str) -> None:
        super().__init__(model, options, device)
        # Of the same weights, and with blocks of its own: caches change those of the other one.
        weights = [*self._transformer.parameters(), *self._transformer.buffers()]
        self._looking = copy.deepcopy(self._transformer, {id(weight): weight for weight in weights})

    def begin(self, inputs: Mapping[str, list[Payload]], wishes: Wishes, seed: int) -> Canvas:
        """Inputs: "text", "thinker" with the codes, and for an edit "picture" with latents."""
        written = inputs["thinker"]
        grid = written[0]["grid"]
        height, width = grid[0] * CODE, grid[1] * CODE
        transformer = self._transformer
        device, dtype = transformer.device, transformer.dtype
        shape = (1, transformer.config.in_channels, height // self._shrinks, width // self._shrinks)
        extras = {
            "codes": doubled(self._codes(written, grid), grid),
            "size": torch.tensor([[height, width]], dtype=dtype, device=device),
        }
        if "given" in written[0]:
            extras["given"] = self._looked_at(written[0], inputs["picture"][0]["latents"])
        return Canvas(
            noise(shape, seed, device, dtype).float(),  # drawn as diffusers does, and exact from then on
            self._schedule(wishes.num_inference_steps or STEPS, height, width),
            conditions_of(inputs["text"], device, dtype),
            GUIDANCE if wishes.guidance_scale is None else wishes.guidance_scale,
            extras=extras,
        )

    def _schedule(self, steps: int, height: int, width: int) -> object:
        """Whole timesteps, and noise shifted by the number of the transformer's patches."""
        config = self._template.config
        edge = self._shrinks * self._transformer.config.patch_size
        patches = (height // edge) * (width // edge)
        timesteps = np.linspace(config.num_train_timesteps, 1.0, steps + 1)[:-1]
        timesteps = timesteps.astype(np.int64).astype(np.float32)
        root = (patches / config.get("base_image_seq_len", 256)) ** 0.5
        return scheduler_for(
            self._template,
            device=self._transformer.device,
            num_inference_steps=steps,
            timesteps=timesteps,
            sigmas=timesteps / config.num_train_timesteps,
            mu=root * config.get("max_shift", 0.75) + config.get("base_shift", 0.25),
        )

    def _codes(self, payloads: Sequence[Payload], grid: Sequence[int]) -> torch.Tensor:
        """Those of the large picture, which come last. Raises ItemError."""
        count = grid[0] * grid[1]
        codes = [code for payload in payloads for code in payload["codes"]][-count:]
        known = self._transformer.config.prior_vq_quantizer_codebook_size
        if len(codes) < count or not 0 <= min(codes) <= max(codes) < known:
            raise ItemError(f"codes: expected {count} from 0 to {known - 1}: of another model?")
        return torch.tensor(codes, device=self._transformer.device)

    def _looked_at(self, written: Payload, pictures: Sequence[Any]) -> Any:
        """Keys and values of all layers for the given pictures, without noise and without words."""
        from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

        transformer = self._looking
        cache = GlmImageKVCache(transformer.config.num_layers)
        cache.set_mode("write")
        grids = written["given_grids"]
        of_each = (
            as_tensor(written["given"]).to(transformer.device).split([math.prod(grid) for grid in grids])
        )
        for latents, codes, grid in zip(pictures, of_each, grids, strict=True):
            prior = doubled(codes.long(), grid)
            size = torch.tensor([[edge * CODE for edge in grid]], device=transformer.device)
            picture = as_tensor(latents)[None].to(transformer.device, transformer.dtype)
            transformer(
                hidden_states=picture,
                encoder_hidden_states=picture.new_zeros(1, 0, transformer.config.text_embed_dim),
                prior_token_id=prior,
                prior_token_drop=torch.zeros_like(prior, dtype=torch.bool),
                timestep=torch.zeros(1, device=transformer.device),
                target_size=size,
                crop_coords=torch.zeros_like(size, dtype=torch.float32),
                return_dict=False,
                kv_caches=cache,
            )
        return cache

    def key(self, row: Row) -> Hashable:
        """As many rows of given pictures, which the negative branch doesn't look at."""
        return super().key(row), 0 if (given := _given(row)) is None else given[0].k_caches[0].shape[1]

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """float32 [rows, channels, height, width]"""
        codes = torch.cat([row.canvas.extras["codes"] for row in rows])
        dropped = torch.tensor([row.branch != POSITIVE for row in rows], device=codes.device)
        size = torch.cat([row.canvas.extras["size"] for row in rows])
        said: torch.Tensor = self._transformer(
            hidden_states=latents_of(rows).to(self._transformer.dtype),
            encoder_hidden_states=stacked(rows, "words"),
            prior_token_id=codes,
            prior_token_drop=dropped[:, None].expand_as(codes),
            timestep=timesteps_of(rows) - 1,
            target_size=size,
            crop_coords=torch.zeros_like(size),
            return_dict=False,
            kv_caches=_joined([_given(row) for row in rows]),
        )[0]
        return said.float()


def _given(row: Row) -> Any:
    """What a row looks at of given pictures; None for nothing."""
    return row.canvas.extras.get("given") if row.branch == POSITIVE else None


def _joined(given: Sequence[Any]) -> Any:
    """That of all rows of a pass: of each of them, or of none."""
    if given[0] is None:
        return None
    joined = type(given[0])(given[0].num_layers)
    joined.set_mode("read")
    for layer, cache in enumerate(joined.caches):
        cache.k_caches = [one[layer].k_caches[0] for one in given]
        cache.v_caches = [one[layer].v_caches[0] for one in given]
    return joined
