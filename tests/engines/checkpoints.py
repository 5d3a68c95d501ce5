"""Small random checkpoints, made offline: what transformers saves, transformers and vllm both load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


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
    config = LlamaConfig(
        **{
            "vocab_size": 320,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "eos_token_id": 258,
            **settings,
        }
    )
    model = roughen(LlamaForCausalLM(config))
    model.save_pretrained(folder)
    return model
