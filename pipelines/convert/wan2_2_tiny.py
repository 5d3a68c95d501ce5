"""A Wan 2.2 with random weights, small enough for any machine: a folder in diffusers' layout.

The three checkpoints of Wan 2.2 have three forms. "t2v" (A14B) makes films of text, with one transformer for
the noisy steps and another for the rest. "i2v" (A14B) does so of text and a first picture, which its
transformers get as further channels. "ti2v" (5B) does both with one transformer, and has a VAE of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pipelines.convert import tiny_diffusion as tiny

Form = Literal["t2v", "i2v", "ti2v"]

TEXT = 32  #: hidden size of the text encoder
#: Steps whose timestep is at least this share of all belong to the first transformer.
BOUNDARY = {"t2v": 0.875, "i2v": 0.9}


def convert(source: Path, target: Path) -> None:
    """Writes the model that makes films of text and of pictures into the folder ``target``, which is created.

    ``source`` is not looked at.
    """
    make(target)


def make(target: Path, form: Form = "ti2v", *, seed: int = 1) -> None:
    """Writes a model of the given form."""
    import diffusers
    import torch
    from transformers import UMT5Config, UMT5EncoderModel

    generator = torch.Generator().manual_seed(seed)
    tokenizer = tiny.t5_tokenizer()
    text = UMT5Config(
        vocab_size=len(tokenizer), d_model=TEXT, d_kv=8, d_ff=2 * TEXT, num_layers=2, num_heads=4
    )
    experts = [
        tiny.randomise(diffusers.WanTransformer3DModel(**_transformer(form)), generator)
        for _ in range(1 if form == "ti2v" else 2)
    ]
    kind = diffusers.WanImageToVideoPipeline if form == "i2v" else diffusers.WanPipeline
    pipeline = kind(
        tokenizer=tokenizer,
        text_encoder=tiny.randomise(UMT5EncoderModel(text), generator),
        vae=_vae(form, generator),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=experts[0],
        transformer_2=experts[1] if len(experts) > 1 else None,
        boundary_ratio=BOUNDARY.get(form),
        expand_timesteps=form == "ti2v",
    )
    tiny.save(pipeline, target)


def _channels(form: Form) -> int:
    """Of the latents."""
    return 6 if form == "ti2v" else 4


def _transformer(form: Form) -> dict[str, Any]:
    latents = _channels(form)
    # Beside the noisy latents "i2v" gets those of the given frames, and which of the four frames of each
    # latent one are given.
    inputs = latents + 4 + latents if form == "i2v" else latents
    return {
        "num_attention_heads": 2,
        "attention_head_dim": 24,
        "in_channels": inputs,
        "out_channels": latents,
        "text_dim": TEXT,
        "freq_dim": 32,
        "ffn_dim": 96,
        "num_layers": 2,
        "rope_max_seq_len": 64,
    }


def _vae(form: Form, generator: Any) -> Any:
    from diffusers import AutoencoderKLWan

    latents = _channels(form)
    own: dict[str, Any] = {}
    if form == "ti2v":
        own = {
            "is_residual": True,
            "patch_size": 2,
            "in_channels": 12,
            "out_channels": 12,
            "scale_factor_spatial": 16,
        }
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=latents,
        dim_mult=[1, 1, 2, 2],
        num_res_blocks=1,
        latents_mean=[0.1 * channel - 0.2 for channel in range(latents)],
        latents_std=[1.0 + 0.1 * channel for channel in range(latents)],
        **own,
    )
    tiny.randomise(vae, generator)
    vae.decoder.conv_out.weight.data *= 0.3  # pixels within -1 and 1, see tiny.kl_vae
    return vae
