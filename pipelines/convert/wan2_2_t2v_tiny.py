"""A small random Wan 2.2 as A14B is: films of text alone, by two transformers."""

from __future__ import annotations

from pathlib import Path

from pipelines.convert import wan2_2_tiny


def convert(source: Path, target: Path) -> None:
    """Writes the model into the folder ``target``, which is created. ``source`` is not looked at."""
    wan2_2_tiny.make(target, "t2v")
