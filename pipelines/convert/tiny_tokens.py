"""A tokenizer for small random models: the bytes of UTF-8, and a family's own special tokens.

It is made here, from nothing, so that it needs no network. Byte b is token b, the special tokens follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BYTES = 256  #: the first special token's id


def make_tokenizer(
    specials: Sequence[str], chat_template: str, named: Mapping[str, str], words: Sequence[str] = ()
) -> Any:
    """A fast tokenizer of transformers.

    Args:
        specials: Tokens that text is never split into; the first has id :data:`BYTES`.
        chat_template: Jinja.
        named: Attributes of the tokenizer, such as "eos_token" or "image_token", and the special tokens that
            they stand for.
        words: Plain text that is one token each; their ids follow those of the special tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: number for number, letter in enumerate(letters())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    usual = {name: token for name, token in named.items() if name in ("bos_token", "eos_token", "pad_token")}
    others = {name: token for name, token in named.items() if name not in usual}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=others, **usual)
    made.chat_template = chat_template
    return made


def chatml(named: Mapping[str, str]) -> str:
    """A chat template: ChatML, in which a part that is no text is one placeholder between its start and end.

    ``named`` has the special tokens by the names of Qwen's processors: "image_token", "vision_bos_token", ...
    """
    seen = (
        f"{{%- if part['type'] == '{kind}' %}}{named[f'{sense}_bos_token']}{named[f'{kind}_token']}"
        f"{named[f'{sense}_eos_token']}{{%- endif -%}}"
        for kind, sense in (("image", "vision"), ("video", "vision"), ("audio", "audio"))
    )
    return (
        "{%- for message in messages -%}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{%- for part in message['content'] -%}"
        f"{''.join(seen)}"
        "{%- if part['type'] == 'text' %}{{ part['text'] }}{% endif -%}"
        "{%- endfor -%}{%- endif %}<|im_end|>\n{% endfor -%}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
    )


def qwen_preprocessor(clip_s: int, **own: Any) -> dict[str, Any]:
    """``preprocessor_config.json`` of a Qwen-Omni: what the families have in common, and their ``own``.

    Args:
        clip_s: The longest clip, seconds.
        own: Mel bins ("feature_size"), patches and sizes of pictures.
    """
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": clip_s,
        "n_samples": clip_s * 16_000,
        "nb_max_frames": clip_s * 100,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "temporal_patch_size": 2,
        "merge_size": 2,
        **own,
    }


def letters() -> list[str]:
    """The letter that stands for each byte in GPT-2's byte-level vocabularies, byte by byte.

    Printable bytes stand for themselves, the others for the letters from U+0100 on, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
