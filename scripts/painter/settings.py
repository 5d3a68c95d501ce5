"""All settings of the painter's training, in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ROOT / "pipelines" / "painter" / "weights"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is made of. The same settings and the same library versions give the same weights."""

    seed: int = 1
    threads: int = 1
    #: Matrix products in bfloat16: three times as fast where the CPU has AMX, slower where it has not
    bfloat16: bool = True
    save_s: float = 60.0  #: between two checkpoints

    # The language model
    language_model: str = "smollm2-135m-instruct"
    layers: int = 4
    max_tokens: int = 24
    prompts: int = 10_000  #: different ones; each comes with many pictures

    # The autoencoder
    autoencoder_steps: int = 1200
    autoencoder_batch: int = 16
    autoencoder_rate: float = 1.5e-3
    shape_weight: float = 12.0  #: of a shape's pixels, and those around it, against the background's
    kl_weight: float = 3e-4
    widths: tuple[int, ...] = (16, 32, 64)  #: of its blocks; each but the last halves the edge
    latent_channels: int = 8

    # The denoiser
    denoiser_steps: int = 4820
    denoiser_batch: int = 32
    denoiser_rate: float = 1.5e-3
    warm_up: int = 50  #: steps of both trainings
    down: float = 0.25  #: share of their steps in which the learning rate goes down
    heads: int = 2
    head_width: int = 64
    blocks: int = 6
    #: From this step on the latents of a shape, and around it, weigh so many times what the others do
    shapes_from: int = 1797
    shapes_weight: float = 4.0
    noisy: float = 0.4  #: mean of the logits of t; above 0: more often near the noise
    without_prompt: float = 0.1  #: share of training pictures, for guidance
    average: float = 0.998  #: of the exponential average of the weights, which is what is kept
    clip: float = 1.0  #: norm of the gradients

    @property
    def vae(self) -> dict[str, Any]:
        """Arguments of diffusers' AutoencoderKL."""
        blocks = len(self.widths)
        return {
            "down_block_types": ["DownEncoderBlock2D"] * blocks,
            "up_block_types": ["UpDecoderBlock2D"] * blocks,
            "block_out_channels": list(self.widths),
            "layers_per_block": 1,
            "latent_channels": self.latent_channels,
            "norm_num_groups": 8,
            "sample_size": 64,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
            "mid_block_add_attention": False,
        }

    def of(self, part: str) -> dict[str, Any]:
        """What the weights of a part hang on: "autoencoder", "denoiser" or (its prompts) "states"."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        for other in ("threads", "save_s", f"{part}_steps"):  # a run may be made longer
            values.pop(other, None)
        wanted: tuple[str, ...]
        if part == "states":
            wanted = ("seed", "bfloat16", "language_model", "layers", "max_tokens", "prompts")
            return {name: values[name] for name in wanted}
        if part == "autoencoder":
            wanted = (
                "seed",
                "bfloat16",
                "kl_weight",
                "shape_weight",
                "widths",
                "latent_channels",
                "warm_up",
                "down",
                "clip",
            )
            return {
                name: value
                for name, value in values.items()
                if name in wanted or name.startswith("autoencoder")
            }
        return values

    @property
    def latent_edge(self) -> int:
        """Rows and columns of latents."""
        return 64 >> (len(self.widths) - 1)

    def transformer(self, states: int) -> dict[str, Any]:
        """Arguments of diffusers' SD3Transformer2DModel; ``states``: width of the language model."""
        return {
            "sample_size": self.latent_edge,
            "patch_size": 2,
            "in_channels": self.latent_channels,
            "out_channels": self.latent_channels,
            "num_layers": self.blocks,
            "attention_head_dim": self.head_width,
            "num_attention_heads": self.heads,
            "caption_projection_dim": self.heads * self.head_width,
            "joint_attention_dim": states,
            "pooled_projection_dim": states,
            "pos_embed_max_size": self.latent_edge // 2,
            "qk_norm": "rms_norm",
        }
