"""A Qwen-Image-Edit with random weights, small enough for any machine: a folder in diffusers' layout."""

from __future__ import annotations

from pathlib import Path

from pipelines.convert import qwen_image_tiny


def convert(source: Path, target: Path) -> None:
    """Writes the model into the folder ``target``, which is created. ``source`` is not looked at."""
    qwen_image_tiny.make(target, edit=True)
