"""Small random checkpoints, made offline: what transformers saves, transformers and vllm both load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
LLAMA: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 258,
}


def save_tokenizer(folder: Path, special: list[str], chat_template: str = CHAT) -> Any:
    """A byte-level tokenizer: a byte is a token, and each special token has the next free id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=names,
        chat_template=chat_template,
    )
    fast.save_pretrained(folder)
    return fast


def seeing(image: str, video: str = "") -> str:
    """A chat template that puts these in the places of media."""
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% elif part['type'] == 'image' %}" + image + "{% else %}" + video + "{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )


def roughen(model: Any, seed: int = 1, std: float = 0.15) -> Any:
    """Larger weights than a model begins with, so that states differ and greedy choices are clear."""
    import torch

    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    return model.eval()


def llama(folder: Path, **settings: Any) -> Any:
    """A Llama of 4 layers with its tokenizer in ``folder``; returns the transformers model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    save_tokenizer(folder, [])
    model = roughen(LlamaForCausalLM(LlamaConfig(**LLAMA | settings)))
    model.save_pretrained(folder)
    return model


def idefics3(folder: Path) -> tuple[Any, Any]:
    """An Idefics3 of 2 layers: tiles of 56 x 56 take 4 tokens; returns transformers' model and processor.

    Of the models that look at pictures, one that transformers and vllm can run without torchvision.
    """
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        LlamaConfig,
    )

    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    special = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *tiles]
    template = seeing("<image>")
    tokenizer = save_tokenizer(folder, special, template)
    text = LlamaConfig(**LLAMA | {"num_hidden_layers": 2, "pad_token_id": tokenizer.pad_token_id})
    eyes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    config = Idefics3Config(
        vision_config=eyes,
        text_config=text,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    model = roughen(Idefics3ForConditionalGeneration(config))
    model.save_pretrained(folder)
    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    processor = Idefics3Processor(pictures, tokenizer, image_seq_len=4, chat_template=template)
    processor.save_pretrained(folder)
    return model, processor


def qwen2_audio(folder: Path) -> tuple[Any, Any]:
    """A Qwen2-Audio of 2 layers; returns transformers' model and processor. Its template knows only texts."""
    from safetensors.torch import load_file, save_file
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        Qwen2Config,
        WhisperFeatureExtractor,
    )

    tokenizer = save_tokenizer(folder, ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"])
    ears = Qwen2AudioEncoderConfig(
        d_model=64, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=80
    )
    config = Qwen2AudioConfig(
        audio_config=ears,
        text_config=Qwen2Config(**LLAMA | {"num_hidden_layers": 2}),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    model = roughen(Qwen2AudioForConditionalGeneration(config))
    model.save_pretrained(folder)
    # transformers 5.19 writes one "model." too many into names; the published checkpoints don't have it.
    weights = load_file(folder / "model.safetensors")
    weights = {
        name.replace("language_model.model.model.", "language_model.model."): weights[name]
        for name in weights
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    processor = Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=80), tokenizer, chat_template=CHAT)
    processor.save_pretrained(folder)
    return model, processor


def qwen2_5_vl(folder: Path) -> tuple[Any, Any]:
    """A Qwen2.5-VL of 2 layers; returns transformers' model and processor. Needs torchvision."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    template = seeing(*(f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")))
    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = save_tokenizer(folder, special, template)
    ids = dict(zip(special, tokenizer.convert_tokens_to_ids(special), strict=True))
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0}
    config = Qwen2_5_VLConfig(
        text_config=LLAMA | {"num_hidden_layers": 2, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": LLAMA["hidden_size"],
            "fullatt_block_indexes": [1],
        },
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
    )
    model = roughen(Qwen2_5_VLForConditionalGeneration(config))
    model.save_pretrained(folder)
    bounds = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size=bounds),
        tokenizer,
        Qwen2VLVideoProcessor(size=bounds),
        chat_template=template,
    )
    processor.save_pretrained(folder)
    return model, processor
