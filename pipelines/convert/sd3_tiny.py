"""An SD3.5 with random weights, small enough for any machine: a folder in diffusers' layout."""

from __future__ import annotations

from pathlib import Path

from pipelines.convert import tiny_diffusion as tiny

CHANNELS = 16  #: of the latents, as many as the real one has
CLIP = 16  #: hidden size of each CLIP, and of its projection
TEXT = 2 * CLIP  #: hidden size of T5, and what the transformer reads


def convert(source: Path, target: Path) -> None:
    """Writes the model into the folder ``target``, which is created. ``source`` is not looked at."""
    make(target)


def make(target: Path, *, seed: int = 1) -> None:
    """Writes a model."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    generator = torch.Generator().manual_seed(seed)
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT,
        caption_projection_dim=32,
        pooled_projection_dim=2 * CLIP,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    pipeline = StableDiffusion3Pipeline(
        transformer=tiny.randomise(transformer, generator),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=tiny.kl_vae(
            CHANNELS,
            generator,
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=tiny.clip_encoder(CLIP, generator, projection=CLIP),
        tokenizer=tiny.clip_tokenizer(),
        text_encoder_2=tiny.clip_encoder(CLIP, generator, projection=CLIP),
        tokenizer_2=tiny.clip_tokenizer(),
        text_encoder_3=tiny.t5_encoder(TEXT, generator),
        tokenizer_3=tiny.t5_tokenizer(),
    )
    tiny.save(pipeline, target)
