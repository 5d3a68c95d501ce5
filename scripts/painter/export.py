"""Writes trained parts as a folder in diffusers' layout, its weights in float16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import torch

from scripts.painter.settings import Settings


def export(folder: Path, settings: Settings, transformer: Any, vae: Any) -> None:
    """Writes transformer, VAE, schedule and settings into a folder."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    folder.mkdir(parents=True, exist_ok=True)
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0)
    for name, part in (("transformer", transformer), ("vae", vae)):
        part.to(torch.float16).save_pretrained(folder / name)
        part.to(torch.float32)
    scheduler.save_pretrained(folder / "scheduler")
    write_json(
        folder / "model_index.json",
        {
            "_class_name": "OmniBrokerPainter",
            "scheduler": ["diffusers", type(scheduler).__name__],
            "transformer": ["diffusers", type(transformer).__name__],
            "vae": ["diffusers", type(vae).__name__],
        },
    )
    write_json(folder / "settings.json", msgspec.to_builtins(settings))


def write_json(file: Path, content: Any) -> None:
    """For people, too."""
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
