"""A Qwen3-Omni with random weights, small enough for any machine: a checkpoint folder like the real one's.

The architecture is whole (mixtures of experts, deepstack, interleaved M-RoPE, code predictor, causal
vocoder), only the sizes are other ones. The weights come from a fixed seed. It writes letters and says noise.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.convert.tiny_tokens import BYTES, chatml, make_tokenizer, qwen_preprocessor

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)
#: The roles are one token each: the model tells messages apart by them.
ROLES = ("system", "user", "assistant")
IDS = {token: BYTES + number for number, token in enumerate((*SPECIALS, *ROLES))}

NAMED = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}

SPEAKERS = ("chelsie", "ethan", "aiden")


class Sizes(NamedTuple):
    """What makes a model large or small. Hidden sizes are multiples of twice the heads."""

    thinker: int = 64  #: hidden size
    thinker_layers: int = 4
    talker: int = 48
    talker_layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    experts: int = 8  #: of a layer, in thinker and talker
    expert: int = 32  #: intermediate size of one
    predictor_layers: int = 2
    codebooks: int = 4
    codes: int = 64  #: of a codebook
    tower: int = 32  #: hidden size of the audio and vision encoders
    vocoder: int = 32  #: hidden size of its transformer
    vocoder_layers: int = 2
    decoder: int = 64  #: channels of the vocoder's first convolution
    positions: int = 8192  #: rows of prompt and answer


def convert(source: Path, target: Path) -> None:
    """Writes the model into the folder ``target``, which is created. ``source`` is not looked at."""
    make(target, Sizes())


def make(target: Path, sizes: Sizes, seed: int = 1) -> None:
    """Writes a model of the given sizes into the folder ``target``, which is created."""
    import torch
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**_config(sizes)))
    _randomise(model, torch.Generator().manual_seed(seed))
    _prefer_letters(model)
    model.code2wav.decoder[-1].conv.weight.data *= 0.01  # else the waveform is cut at 1
    model.generation_config.eos_token_id = IDS["<|im_end|>"]
    model.generation_config.pad_token_id = IDS["<|endoftext|>"]
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    make_tokenizer(SPECIALS, chatml(NAMED), NAMED, ROLES).save_pretrained(target)
    (target / "preprocessor_config.json").write_text(json.dumps(_preprocessor(), indent=1), "utf-8")


def _randomise(model: Any, generator: Any) -> None:
    """Normal weights that keep a signal's size, so that no layer of the model goes unheard."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                inputs = parameter.shape[-1] if ".experts." in name else parameter[0].numel()
                parameter.normal_(0, 1 if "embed" in name else inputs**-0.5, generator=generator)
            elif name.endswith(("gamma", "scale")):
                parameter.fill_(0.5)


def _prefer_letters(model: Any) -> None:
    """The thinker's answers are letters and spaces, sometimes an end; nothing else can be likely."""
    import torch

    head = model.thinker.lm_head.weight
    likely = [*map(ord, string.ascii_letters + " .,"), IDS["<|im_end|>"]]
    with torch.no_grad():
        kept = head[likely].clone()
        kept[-1] *= 0.7
        head.zero_()
        head[likely] = kept


def _config(sizes: Sizes) -> dict[str, Any]:
    media = {
        "audio_token_id": IDS["<|audio_pad|>"],
        "image_token_id": IDS["<|image_pad|>"],
        "video_token_id": IDS["<|video_pad|>"],
        "audio_start_token_id": IDS["<|audio_start|>"],
        "vision_start_token_id": IDS["<|vision_start|>"],
        "position_id_per_seconds": 13,
    }
    audio = {
        "num_mel_bins": 128,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": sizes.tower * 2,
        "d_model": sizes.tower,
        "output_dim": sizes.thinker,
        "n_window": 50,
        "n_window_infer": 400,
        "downsample_hidden_size": 8,
    }
    return {
        "im_start_token_id": IDS["<|im_start|>"],
        "im_end_token_id": IDS["<|im_end|>"],
        "tts_pad_token_id": IDS["<tts_pad>"],
        "tts_bos_token_id": IDS["<tts_text_bos>"],
        "tts_eos_token_id": IDS["<tts_text_eod>"],
        "system_token_id": IDS["system"],
        "user_token_id": IDS["user"],
        "assistant_token_id": IDS["assistant"],
        "thinker_config": {
            **media,
            "user_token_id": IDS["user"],
            "audio_config": audio,
            "vision_config": {
                "depth": 3,
                "hidden_size": sizes.tower,
                "intermediate_size": sizes.tower * 2,
                "num_heads": 2,
                "out_hidden_size": sizes.thinker,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
            "text_config": {
                "vocab_size": BYTES + len(IDS),
                "hidden_size": sizes.thinker,
                "intermediate_size": sizes.thinker * 2,
                "num_hidden_layers": sizes.thinker_layers,
                "num_attention_heads": sizes.heads,
                "num_key_value_heads": sizes.kv_heads,
                "head_dim": sizes.thinker // sizes.heads,
                "moe_intermediate_size": sizes.expert,
                "num_experts": sizes.experts,
                "num_experts_per_tok": 2,
                "max_position_embeddings": sizes.positions,
                "rope_parameters": _rope(sizes.thinker // sizes.heads),
            },
        },
        "talker_config": {
            **media,
            "audio_config": audio,
            "spatial_merge_size": 2,
            "accept_hidden_layer": sizes.thinker_layers - 1,
            "thinker_hidden_size": sizes.thinker,
            "num_code_groups": sizes.codebooks,
            "speaker_id": {name: sizes.codes + 10 + n for n, name in enumerate(SPEAKERS)},
            "codec_pad_id": sizes.codes + 0,
            "codec_bos_id": sizes.codes + 1,
            "codec_eos_token_id": sizes.codes + 2,
            "codec_nothink_id": sizes.codes + 3,
            "codec_think_bos_id": sizes.codes + 4,
            "codec_think_eos_id": sizes.codes + 5,
            "text_config": {
                "vocab_size": sizes.codes + 1024,
                "hidden_size": sizes.talker,
                "intermediate_size": sizes.talker * 2,
                "num_hidden_layers": sizes.talker_layers,
                "num_attention_heads": sizes.heads,
                "num_key_value_heads": sizes.kv_heads,
                "head_dim": sizes.talker // sizes.heads,
                "moe_intermediate_size": sizes.expert,
                "shared_expert_intermediate_size": sizes.expert,
                "num_experts": sizes.experts,
                "num_experts_per_tok": 2,
                "max_position_embeddings": sizes.positions,
                "rope_parameters": _rope(sizes.talker // sizes.heads),
            },
            "code_predictor_config": {
                "vocab_size": sizes.codes,
                "hidden_size": sizes.talker,
                "intermediate_size": sizes.talker * 2,
                "num_hidden_layers": sizes.predictor_layers,
                "num_attention_heads": sizes.heads,
                "num_key_value_heads": sizes.kv_heads,
                "head_dim": sizes.talker // sizes.heads,
                "num_code_groups": sizes.codebooks,
                "max_position_embeddings": 64,
            },
        },
        "code2wav_config": {
            "codebook_size": sizes.codes,
            "num_quantizers": sizes.codebooks,
            "hidden_size": sizes.vocoder,
            "intermediate_size": sizes.vocoder * 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_hidden_layers": sizes.vocoder_layers,
            "sliding_window": 16,
            "decoder_dim": sizes.decoder,
        },
    }


def _rope(head_dim: int) -> dict[str, Any]:
    height = width = head_dim // 8
    return {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [head_dim // 2 - height - width, height, width],
        "interleaved": True,
        "mrope_interleaved": True,
    }


def _preprocessor() -> dict[str, Any]:
    """As in the real checkpoint, with smaller pictures."""
    return qwen_preprocessor(
        300,
        processor_class="Qwen3OmniMoeProcessor",
        feature_size=128,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
        min_pixels=32 * 32,
        max_pixels=128 * 128,
        patch_size=16,
    )
