"""Checkpoints in diffusers' layout that are none, or lack a part, are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from workers.families.parts import Parts


def folder(path: Path, **index: Any) -> Parts:
    (path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **index}))
    return Parts(str(path), device="cpu")


def test_a_folder_without_an_index_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model_index\.json"):
        Parts(str(tmp_path), device="cpu")


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    parts = folder(tmp_path, text_encoder=[None, None])
    assert not parts.has("text_encoder")
    assert not parts.has("transformer")
    for name in ("text_encoder", "transformer"):
        with pytest.raises(ValueError, match=f"names no {name}"):
            parts.module(name)


def test_a_part_of_another_library_is_not_imported(tmp_path: Path) -> None:
    parts = folder(tmp_path, vae=["os", "system"])
    with pytest.raises(ValueError, match="'os'"):
        parts.module("vae")


def test_on_a_cpu_weights_are_float32_unless_one_says_otherwise(tmp_path: Path) -> None:
    import torch

    assert folder(tmp_path).dtype == torch.float32
    assert Parts(str(tmp_path), device="cpu", dtype="bfloat16").dtype == torch.bfloat16


def test_weights_that_are_missing_are_named_and_not_made_up(tmp_path: Path) -> None:
    from diffusers import AutoencoderKL
    from safetensors.torch import load_file, save_file

    AutoencoderKL(block_out_channels=(4,), norm_num_groups=1).save_pretrained(tmp_path / "vae")
    parts = folder(tmp_path, vae=["diffusers", "AutoencoderKL"])
    assert not next(parts.module("vae").parameters()).requires_grad
    file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    del weights["decoder.conv_out.bias"]
    save_file(weights, file)
    with pytest.raises(ValueError, match=r"vae has no decoder\.conv_out\.bias"):
        parts.module("vae")
