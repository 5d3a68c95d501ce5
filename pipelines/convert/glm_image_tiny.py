"""A GLM-Image with random weights, small enough for any machine: a folder in diffusers' layout.

Its language model writes a picture's codes, a small picture's first and then those of the large one; the
transformer draws by these and by the words that shall stand in the picture.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelines.convert import tiny_diffusion as tiny
from pipelines.convert.tiny_tokens import BYTES, make_tokenizer

#: Codes of pictures are the first ids, as in the real one, where text has others. Here these are the bytes.
CODES = BYTES
SPECIALS = ("<|image_start|>", "<|image_end|>", "<|image|>", "<sop>", "<eop>", "<|endoftext|>", "<|user|>")
IDS = {token: BYTES + number for number, token in enumerate(SPECIALS)}

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|user|>{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' %}<|image_start|><|image|><|image_end|>{% else %}{{ part['text'] }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
"""

TEXT = 32  #: hidden size of the encoder of words
CHANNELS = 4  #: of the latents


def convert(source: Path, target: Path) -> None:
    """Writes the model into the folder ``target``, which is created. ``source`` is not looked at."""
    make(target)


def make(target: Path, *, seed: int = 1) -> None:
    """Writes a model."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, GlmImagePipeline, GlmImageTransformer2DModel
    from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

    generator = torch.Generator().manual_seed(seed)
    tokenizer = ByT5Tokenizer()
    text = T5Config(vocab_size=len(tokenizer), d_model=TEXT, d_kv=8, d_ff=2 * TEXT, num_layers=2, num_heads=4)
    transformer = GlmImageTransformer2DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=TEXT,
        time_embed_dim=32,
        condition_dim=16,
        prior_vq_quantizer_codebook_size=CODES,
    )
    pipeline = GlmImagePipeline(
        tokenizer=tokenizer,
        processor=_processor(),
        text_encoder=tiny.randomise(T5EncoderModel(text), generator),
        vision_language_encoder=_language_model(generator),
        vae=tiny.kl_vae(
            CHANNELS,
            generator,
            latents_mean=[0.1 * channel - 0.2 for channel in range(CHANNELS)],
            latents_std=[1.0 + 0.1 * channel for channel in range(CHANNELS)],
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        transformer=tiny.randomise(transformer, generator),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
    )
    tiny.save(pipeline, target)
    _name_libraries(target / "model_index.json")


def _name_libraries(file: Path) -> None:
    """As the real checkpoint has it. diffusers takes transformers' package glm_image for one of its own."""
    index = json.loads(file.read_text("utf-8"))
    for name, entry in index.items():
        if isinstance(entry, list) and entry[0] == "glm_image":
            index[name] = ["transformers", entry[1]]
    file.write_text(json.dumps(index, indent=1), "utf-8")


def _processor() -> Any:
    from transformers import GlmImageProcessor
    from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

    named = {
        "bos_token": "<|image_start|>",
        "eos_token": "<|image_end|>",
        "pad_token": "<|endoftext|>",
        "image_token": "<|image|>",
        "grid_bos_token": "<sop>",
        "grid_eos_token": "<eop>",
    }
    tokenizer = make_tokenizer(SPECIALS, CHAT_TEMPLATE, named)
    pictures = GlmImageImageProcessorPil(
        patch_size=16,
        temporal_patch_size=1,
        merge_size=1,
        size={"shortest_edge": 64 * 64, "longest_edge": 512 * 512},
    )
    return GlmImageProcessor(pictures, tokenizer, chat_template=CHAT_TEMPLATE)


def _language_model(generator: Any) -> Any:
    from transformers import GlmImageConfig, GlmImageForConditionalGeneration

    config = GlmImageConfig(
        text_config={
            "vocab_size": BYTES + len(SPECIALS),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
            "vision_vocab_size": CODES + 2,
            "pad_token_id": IDS["<|endoftext|>"],
            "eos_token_id": IDS["<|image_end|>"],
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "image_size": 64,
        },
        vq_config={"embed_dim": 16, "num_embeddings": CODES, "latent_channels": 16},
        image_token_id=IDS["<|image|>"],
        image_start_token_id=IDS["<|image_start|>"],
        image_end_token_id=IDS["<|image_end|>"],
    )
    model = tiny.randomise(GlmImageForConditionalGeneration(config), generator)
    model.lm_head.weight.data[CODES:] = 0  # the marks of a picture's start and end come seldom
    settings = model.generation_config
    settings.temperature, settings.top_k, settings.top_p = 0.9, 32, 0.75
    settings.do_sample = True
    settings.eos_token_id = IDS["<|image_end|>"]
    settings.pad_token_id = IDS["<|endoftext|>"]
    return model
