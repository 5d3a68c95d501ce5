"""A Qwen2.5-Omni with random weights, small enough for any machine: a checkpoint folder like the real one's.

The architecture is transformers' own, only the sizes are other ones, so all that runs with it runs with a
real checkpoint. The weights come from a fixed seed. It can write nothing sensible; it writes letters.
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
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single_codebook>",
)
IDS = {token: BYTES + number for number, token in enumerate(SPECIALS)}
VOCABULARY = BYTES + len(SPECIALS)

NAMED = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}

SPEAKERS = ("Chelsie", "Ethan")


class Sizes(NamedTuple):
    """What makes a model large or small. Hidden sizes are multiples of twice the heads."""

    thinker: int = 64  #: hidden size
    thinker_layers: int = 3
    talker: int = 48
    talker_layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    codes: int = 96  #: of the talker's codebook
    tower: int = 32  #: hidden size of the audio and vision encoders
    dit: int = 32  #: hidden size of the diffusion model
    dit_layers: int = 4
    vocoder: int = 32  #: channels of its first layer
    positions: int = 4096  #: rows of prompt and answer


def convert(source: Path, target: Path) -> None:
    """Writes the model into the folder ``target``, which is created. ``source`` is not looked at."""
    make(target, Sizes())


def make(target: Path, sizes: Sizes, seed: int = 1) -> None:
    """Writes a model of the given sizes into the folder ``target``, which is created."""
    import torch
    from transformers import Qwen2_5OmniConfig
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

    generator = torch.Generator().manual_seed(seed)
    config = Qwen2_5OmniConfig(
        thinker_config=_thinker(sizes), talker_config=_talker(sizes), token2wav_config=_token2wav(sizes)
    )
    model = modeling.Qwen2_5OmniForConditionalGeneration(config)
    _randomise(model, generator)
    _prefer_letters(model)
    model.talker.codec_head.weight.data[sizes.codes :] *= 0.5  # ends and other marks come seldom
    model.token2wav.code2wav_bigvgan_model.conv_post.weight.data *= 0.1  # else the waveform is cut at 1
    model.generation_config.eos_token_id = IDS["<|im_end|>"]
    model.generation_config.pad_token_id = IDS["<|endoftext|>"]
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    make_tokenizer(SPECIALS, chatml(NAMED), NAMED).save_pretrained(target)
    (target / "preprocessor_config.json").write_text(json.dumps(_preprocessor(), indent=1), "utf-8")
    speakers = {
        name: {
            "bos_token": IDS[token],
            "cond": torch.randn(1, config.token2wav_config.dit_config.enc_emb_dim, generator=generator),
            "ref_mel": torch.randn(1, 30, config.token2wav_config.dit_config.mel_dim, generator=generator),
        }
        for name, token in zip(SPEAKERS, ("<tts_text_bos>", "<tts_text_bos_single_codebook>"), strict=True)
    }
    torch.save(speakers, target / "spk_dict.pt")


def _randomise(model: Any, generator: Any) -> None:
    """Normal weights that keep a signal's size; the ones of norms and the snake functions stay.

    Embeddings are as large as hidden states, so that answers depend on their tokens and hardly ever repeat.
    """
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.weight.normal_(0, 1, generator=generator)


def _prefer_letters(model: Any) -> None:
    """The thinker's answers are letters and spaces, sometimes an end; nothing else can be likely."""
    import torch

    head = model.thinker.lm_head.weight
    likely = [*map(ord, string.ascii_letters + " .,"), IDS["<|im_end|>"]]
    with torch.no_grad():
        kept = head[likely].clone()
        head.mul_(0.02)
        head[likely] = kept * 2


def _rope(size: int, heads: int) -> dict[str, Any]:
    half = size // heads // 2
    height = width = half * 3 // 8
    sections = [half - height - width, height, width]
    return {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": sections}


def _thinker(sizes: Sizes) -> dict[str, Any]:
    return {
        "audio_config": {
            "num_mel_bins": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": sizes.tower * 2,
            "d_model": sizes.tower,
            "max_source_positions": 200,
            "n_window": 50,
            "output_dim": sizes.thinker,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": sizes.tower,
            "intermediate_size": sizes.tower * 2,
            "num_heads": 2,
            "patch_size": 14,
            "window_size": 56,
            "out_hidden_size": sizes.thinker,
            "fullatt_block_indexes": [1],
        },
        "text_config": {
            "vocab_size": VOCABULARY,
            "hidden_size": sizes.thinker,
            "intermediate_size": sizes.thinker * 4,
            "num_hidden_layers": sizes.thinker_layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "max_position_embeddings": sizes.positions,
            "max_window_layers": sizes.thinker_layers,
            "rope_parameters": _rope(sizes.thinker, sizes.heads),
            "tie_word_embeddings": False,
        },
        "audio_token_index": IDS["<|AUDIO|>"],
        "image_token_index": IDS["<|IMAGE|>"],
        "video_token_index": IDS["<|VIDEO|>"],
        "audio_start_token_id": IDS["<|audio_bos|>"],
        "audio_end_token_id": IDS["<|audio_eos|>"],
        "vision_start_token_id": IDS["<|vision_bos|>"],
        "vision_end_token_id": IDS["<|vision_eos|>"],
        "eos_token_id": IDS["<|im_end|>"],
        "pad_token_id": IDS["<|endoftext|>"],
    }


def _talker(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.codes + 8,
        "embedding_size": sizes.thinker,
        "hidden_size": sizes.talker,
        "intermediate_size": sizes.talker * 4,
        "num_hidden_layers": sizes.talker_layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.talker // sizes.heads,
        "max_position_embeddings": sizes.positions,
        "max_window_layers": sizes.talker_layers,
        "rope_parameters": _rope(sizes.talker, sizes.heads),
        "audio_token_index": IDS["<|AUDIO|>"],
        "image_token_index": IDS["<|IMAGE|>"],
        "video_token_index": IDS["<|VIDEO|>"],
        "audio_start_token_id": IDS["<|audio_bos|>"],
        "audio_end_token_id": IDS["<|audio_eos|>"],
        "vision_start_token_id": IDS["<|vision_bos|>"],
        "vision_end_token_id": IDS["<|vision_eos|>"],
        "tts_text_start_token_id": IDS["<tts_text_bos>"],
        "tts_text_end_token_id": IDS["<tts_text_eod>"],
        "tts_text_pad_token_id": IDS["<tts_pad>"],
        "tts_codec_pad_token_id": sizes.codes,
        "tts_codec_start_token_id": sizes.codes + 1,
        "tts_codec_end_token_id": sizes.codes + 2,
        "tts_codec_mask_token_id": sizes.codes + 4,
    }


def _token2wav(sizes: Sizes) -> dict[str, Any]:
    return {
        "dit_config": {
            "hidden_size": sizes.dit,
            "num_hidden_layers": sizes.dit_layers,
            "num_attention_heads": 2,
            "head_dim": sizes.dit // 2,
            "emb_dim": sizes.dit,
            "look_ahead_layers": [1],
            "look_backward_layers": [0, sizes.dit_layers - 1],
            "num_embeds": sizes.codes + 8,
            "enc_emb_dim": 16,
            "enc_dim": 16,
            "enc_channels": [16, 16, 16, 16, 48],
            "enc_attention_channels": 8,
            "enc_se_channels": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "bigvgan_config": {
            "upsample_initial_channel": sizes.vocoder,
            "upsample_rates": [5, 4, 4, 3],
            "upsample_kernel_sizes": [11, 8, 8, 7],
        },
    }


def _preprocessor() -> dict[str, Any]:
    """As in the real checkpoint, with fewer mel bins, shorter clips and smaller pictures."""
    return qwen_preprocessor(
        60,
        processor_class="Qwen2_5OmniProcessor",
        feature_size=32,
        dither=0.0,
        image_mean=[0.48145466, 0.4578275, 0.40821073],
        image_std=[0.26862954, 0.26130258, 0.27577711],
        min_pixels=56 * 56,
        max_pixels=112 * 112,
        patch_size=14,
    )
