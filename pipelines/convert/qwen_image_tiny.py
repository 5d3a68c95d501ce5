"""A Qwen-Image with random weights, small enough for any machine: a folder in diffusers' layout.

``make(..., edit=True)`` writes a Qwen-Image-Edit (2509), which looks at pictures too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pipelines.convert import tiny_diffusion as tiny
from pipelines.convert.tiny_tokens import letters

CHANNELS = 4  #: of the latents
TEXT = 32  #: hidden size of the text encoder
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
#: What the model is told before each prompt, of which diffusers drops the first 34 tokens (64 for edits).
#: With these words as tokens that is the same text as with the real tokenizer, and nothing else.
_TOLD = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships "
    "of the objects and background: Describe the key features of the input image (color, shape), then "
    "explain how the user's text instruction should alter or modify the image. Generate a new image that "
    "meets the user's requirements while maintaining consistency with the original input where appropriate."
)


def convert(source: Path, target: Path) -> None:
    """Writes the model into the folder ``target``, which is created. ``source`` is not looked at."""
    make(target)


def make(target: Path, *, edit: bool = False, seed: int = 1) -> None:
    """Writes a model: one that draws, or one that edits."""
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    generator = torch.Generator().manual_seed(seed)
    transformer = QwenImageTransformer2DModel(
        in_channels=CHANNELS * 4,
        out_channels=CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT,
        axes_dims_rope=(4, 6, 6),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    pipeline = QwenImagePipeline(
        scheduler=scheduler,
        vae=_vae(generator),
        text_encoder=_text_encoder(generator),
        tokenizer=_tokenizer(),
        transformer=tiny.randomise(transformer, generator),
    )
    tiny.save(pipeline, target)
    if edit:
        _make_editor(target)


def _make_editor(target: Path) -> None:
    """The editing model differs in its pipeline's name and has a processor for pictures."""
    index = json.loads((target / "model_index.json").read_text("utf-8"))
    index["_class_name"] = "QwenImageEditPlusPipeline"
    index["processor"] = ["transformers", "Qwen2VLProcessor"]
    (target / "model_index.json").write_text(json.dumps(index, indent=1), "utf-8")
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 1280,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    folder = target / "processor"
    _tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=1), "utf-8")


def _tokenizer() -> Any:
    from transformers import Qwen2Tokenizer

    vocabulary = {letter: number for number, letter in enumerate(letters())}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=32_768)
    tokenizer.add_tokens(list(SPECIALS), special_tokens=True)
    words = re.findall(r" ?[A-Za-z]+|'s| \(|\),|[,.:]", _TOLD)
    tokenizer.add_tokens(sorted({*words, "Describe", "system", "user", "assistant"}))
    return tokenizer


def _text_encoder(generator: Any) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = _tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIALS}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": TEXT,
            "intermediate_size": TEXT * 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "max_window_layers": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": TEXT,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return tiny.randomise(Qwen2_5_VLForConditionalGeneration(config), generator)


def _vae(generator: Any) -> Any:
    from diffusers import AutoencoderKLQwenImage

    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=CHANNELS,
        dim_mult=[1, 1, 2, 2],
        num_res_blocks=1,
        latents_mean=[-0.7, 0.1, 0.9, -0.2],
        latents_std=[2.8, 1.4, 2.3, 1.2],
    )
    return tiny.randomise(vae, generator)
