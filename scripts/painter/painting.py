"""The painter in one process: a plain loop over diffusers' parts, without the server.

What the pipeline `painter` gives is held against this, and the evaluation paints with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workers.families.painter.text import States
from workers.families.painter.wishes import GUIDANCE, STEPS


class Plain:
    """Thinker, denoiser and VAE.

    Args:
        thinker: The language model's first layers.
        transformer: diffusers' SD3Transformer2DModel.
        vae: diffusers' AutoencoderKL.
        scheduler: A flow-matching scheduler of diffusers.
    """

    def __init__(self, thinker: States, transformer: Any, vae: Any, scheduler: Any) -> None:
        self.thinker = thinker
        self.transformer = transformer
        self.vae = vae
        self.scheduler = scheduler

    @classmethod
    def load(
        cls, weights: Path, language_model: str, layers: int, max_tokens: int, device: str = "cpu"
    ) -> Plain:
        """From a folder in diffusers' layout, in float32."""
        from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel

        transformer = SD3Transformer2DModel.from_pretrained(
            weights, subfolder="transformer", torch_dtype=torch.float32
        )
        vae = AutoencoderKL.from_pretrained(weights, subfolder="vae", torch_dtype=torch.float32)
        return cls(
            States(language_model, layers, max_tokens, device=device, dtype="float32"),
            transformer.to(device).eval(),
            vae.to(device).eval(),
            FlowMatchEulerDiscreteScheduler.from_pretrained(weights, subfolder="scheduler"),
        )

    def latents(
        self, texts: Sequence[str], seeds: Sequence[int], steps: int = STEPS, guidance: float = GUIDANCE
    ) -> torch.Tensor:
        """[texts, channels, height, width]; each picture's noise is drawn from its own seed."""
        with torch.inference_mode():
            config = self.transformer.config
            shape = (1, config.in_channels, config.sample_size, config.sample_size)
            latents = torch.cat(
                [torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed)) for seed in seeds]
            )
            latents = latents.to(self.transformer.device)
            guided = guidance > 1
            rows, pooled = self.thinker([*[""] * len(texts), *texts] if guided else list(texts))
            self.scheduler.set_timesteps(steps, device=latents.device)
            for timestep in self.scheduler.timesteps:
                said = self.transformer(
                    hidden_states=torch.cat([latents, latents]) if guided else latents,
                    timestep=timestep.expand(len(rows)),
                    encoder_hidden_states=rows,
                    pooled_projections=pooled,
                    return_dict=False,
                )[0]
                if guided:
                    negative, positive = said.chunk(2)
                    said = negative + guidance * (positive - negative)
                latents = self.scheduler.step(said, timestep, latents, return_dict=False)[0]
            return latents

    def decode(self, latents: torch.Tensor) -> NDArray[np.uint8]:
        """[n, channels, height, width] -> [n, 64, 64, 3]"""
        with torch.inference_mode():
            config = self.vae.config
            pixels = self.vae.decode(
                latents / config.scaling_factor + config.shift_factor, return_dict=False
            )[0]
            levels = (pixels * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1) * 255
            pictures: NDArray[np.uint8] = levels.round().to(torch.uint8).cpu().numpy()
            return pictures

    def paint(
        self, texts: Sequence[str], seeds: Sequence[int], steps: int = STEPS, guidance: float = GUIDANCE
    ) -> NDArray[np.uint8]:
        """Pictures, [texts, 64, 64, 3]."""
        return self.decode(self.latents(texts, seeds, steps, guidance))
