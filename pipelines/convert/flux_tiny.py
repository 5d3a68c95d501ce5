"""A FLUX with random weights, small enough for any machine: a folder in diffusers' layout.

It is FLUX.1-dev in small: the guidance scale is an input of the transformer.
"""

from __future__ import annotations

from pathlib import Path

from pipelines.convert import tiny_diffusion as tiny

CHANNELS = 4  #: of the latents
TEXT = 32  #: hidden size of both text encoders


def convert(source: Path, target: Path) -> None:
    """Writes the model into the folder ``target``, which is created. ``source`` is not looked at."""
    make(target)


def make(target: Path, *, guidance_embeds: bool = True, seed: int = 1) -> None:
    """Writes a model. ``guidance_embeds=False``: one like FLUX.1-schnell, which takes no guidance scale."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    generator = torch.Generator().manual_seed(seed)
    transformer = FluxTransformer2DModel(
        in_channels=CHANNELS * 4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT,
        pooled_projection_dim=TEXT,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0 if guidance_embeds else 1.0,
        use_dynamic_shifting=guidance_embeds,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    pipeline = FluxPipeline(
        scheduler=scheduler,
        vae=tiny.kl_vae(
            CHANNELS,
            generator,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=tiny.clip_encoder(TEXT, generator),
        tokenizer=tiny.clip_tokenizer(),
        text_encoder_2=tiny.t5_encoder(TEXT, generator),
        tokenizer_2=tiny.t5_tokenizer(),
        transformer=tiny.randomise(transformer, generator),
    )
    tiny.save(pipeline, target)
