"""GLM-Image's diffusion transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from adapters.chunk import Payload
from pipelines.options import DiffusionOptions
from workers.engine import ItemError
from workers.engines.diffusion.family import (
    POSITIVE,
    Canvas,
    Denoiser,
    Row,
    Wishes,
    conditions_of,
    latents_of,
    stacked,
    timesteps_of,
)
from workers.engines.diffusion.schedule import scheduler_for
from workers.engines.diffusion.tensors import noise
from workers.families.find import refuse
from workers.families.glm_image.wishes import CODE, GUIDANCE, STEPS, picture_size
from workers.families.parts import Parts


class GlmImage(Denoiser):
    """Latents [1, channels, height, width]. The negative branch draws without the codes."""

    def __init__(self, model: str, options: DiffusionOptions, device: str) -> None:
        super().__init__(model, options, device)
        refuse(options, "family_options")
        parts = Parts(model, device=device, dtype=options.dtype)
        self._transformer = parts.module("transformer")
        self.transformers = [self._transformer]
        self._template = parts.plain("scheduler")
        blocks = parts.config("vae")["block_out_channels"]
        self._shrinks = 2 ** (len(blocks) - 1)  #: pixels of a latent's edge

    def begin(self, inputs: Mapping[str, list[Payload]], wishes: Wishes, seed: int) -> Canvas:
        """Inputs: "text", and "thinker" with the codes."""
        height, width = picture_size(wishes)
        transformer = self._transformer
        device, dtype = transformer.device, transformer.dtype
        shape = (1, transformer.config.in_channels, height // self._shrinks, width // self._shrinks)
        return Canvas(
            noise(shape, seed, device, dtype).float(),  # drawn as diffusers does, and exact from then on
            self._schedule(wishes.num_inference_steps or STEPS, height, width),
            conditions_of(inputs["text"], device, dtype),
            GUIDANCE if wishes.guidance_scale is None else wishes.guidance_scale,
            extras={
                "codes": self._codes(inputs["thinker"], height, width),
                "size": torch.tensor([[height, width]], dtype=dtype, device=device),
            },
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

    def _codes(self, payloads: Sequence[Payload], height: int, width: int) -> torch.Tensor:
        """Those of the large picture, each for 2 x 2 patches: int [1, patches]. Raises ItemError."""
        rows, columns = height // CODE, width // CODE
        codes = [code for payload in payloads for code in payload["codes"]][-rows * columns :]
        known = self._transformer.config.prior_vq_quantizer_codebook_size
        if len(codes) < rows * columns or not 0 <= min(codes) <= max(codes) < known:
            raise ItemError(f"codes: expected {rows * columns} from 0 to {known - 1}: of another model?")
        grid = torch.tensor(codes, device=self._transformer.device).view(rows, columns)
        return grid.repeat_interleave(2, 0).repeat_interleave(2, 1).view(1, -1)

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
        )[0]
        return said.float()
