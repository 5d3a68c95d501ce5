"""Parts that small random picture models share: tokenizers, text encoders and a VAE, in diffusers' layout.

The classes are those that real checkpoints name, so a loader meets nothing new in a real one.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from pipelines.convert.tiny_tokens import letters

#: CLIP reads so many tokens of a prompt, as the real ones do.
CLIP_LENGTH = 77


def randomise(module: Any, generator: Any) -> Any:
    """Normal weights that keep a signal's size, and small biases; one-dimensional weights (norms) stay."""
    import torch

    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            if parameter.ndim > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1, generator=generator)
        for _, part in sorted(module.named_modules(), key=lambda item: item[0]):
            if isinstance(part, torch.nn.Embedding):
                part.weight.normal_(0, 1, generator=generator)
    return module.eval()


def clip_tokenizer() -> Any:
    """Each byte is a token, and each byte at a word's end another."""
    from transformers import CLIPTokenizer

    pieces = [*letters(), *(letter + "</w>" for letter in letters()), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CLIP_LENGTH)


def clip_encoder(size: int, generator: Any, *, projection: int | None = None) -> Any:
    """A CLIPTextModel of hidden size ``size``; with ``projection`` a CLIPTextModelWithProjection."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    tokenizer = clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=size,
        intermediate_size=size * 2,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=CLIP_LENGTH,
        projection_dim=projection or size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    kind = CLIPTextModelWithProjection if projection else CLIPTextModel
    return randomise(kind(config), generator)


def t5_tokenizer(length: int = 512) -> Any:
    """Each printable ASCII character is a token, all others are unknown."""
    from transformers import T5Tokenizer

    plain = string.ascii_letters + string.digits + string.punctuation
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    vocabulary += [(letter, -3.0) for letter in plain]
    return T5Tokenizer(vocab=vocabulary, model_max_length=length, extra_ids=0)


def t5_encoder(size: int, generator: Any) -> Any:
    """A T5EncoderModel of hidden size ``size``."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(t5_tokenizer()),
        d_model=size,
        d_kv=size // 4,
        d_ff=size * 2,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dense_act_fn="gelu_new",
    )
    return randomise(T5EncoderModel(config), generator)


def kl_vae(channels: int, generator: Any, **more: Any) -> Any:
    """An AutoencoderKL with ``channels`` latent channels that shrinks pictures by 8.

    Its pixels lie well within -1 and 1, so that comparisons see differences and not the clamp.
    """
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        block_out_channels=(8, 8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=channels,
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=64,
        **more,
    )
    randomise(vae, generator)
    vae.decoder.conv_out.weight.data *= 0.3
    return vae


def save(pipeline: Any, target: Path) -> None:
    """Writes a diffusers pipeline object as a folder, without a bar of progress."""
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(target)
