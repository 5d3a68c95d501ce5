"""GGUF to what vLLM and transformers read: safetensors, config, tokenizer, chat template.

Quantised blocks are expanded once, here, so that every engine that shares the model starts quickly and
computes with the same weights. They are stored as bfloat16: half the size of float32, and the blocks carry
fewer bits than that. Engines choose for themselves in which type they compute.
"""

from __future__ import annotations

from pathlib import Path

from pipelines.torch_companions import check


def convert(source: Path, target: Path) -> None:
    """Writes the model in ``source`` (a GGUF file, or a folder that holds exactly one) as a model folder.

    ``target`` is created. Needs the extra ``gguf``. Raises ValueError when there is not exactly one file.
    """
    file = _find(source)
    check()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    where, name = str(file.parent), file.name
    model = AutoModelForCausalLM.from_pretrained(
        where,
        gguf_file=name,
        quantization_config=GgufConfig(gguf_file=name, dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    # The file names no sampling settings. An answer ends where the tokenizer says that a turn ends.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.config.dtype = torch.bfloat16
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _find(source: Path) -> Path:
    files = [source] if source.is_file() else sorted(source.rglob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"{source} holds {len(files)} GGUF files, not one")
    return files[0]
