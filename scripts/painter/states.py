"""The language model's states of all training prompts, computed once."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

from scripts.painter.pictures import as_numbers
from scripts.painter.prompts import training
from scripts.painter.settings import Settings
from scripts.painter.state import Progress


class Told(NamedTuple):
    """Training prompts."""

    rows: torch.Tensor  #: float16 [prompts, max_tokens, hidden]
    pooled: torch.Tensor  #: float32 [prompts, hidden]
    asked: torch.Tensor  #: int64 [prompts, 5], see :func:`scripts.painter.pictures.as_numbers`
    mean: torch.Tensor  #: of the states' entries, [hidden]
    deviation: torch.Tensor  #: [hidden]


def told(settings: Settings, folder: Path) -> Told:
    """From the folder, or computed and put there."""
    file = folder / "states.pt"
    of = repr(settings.of("states"))
    if file.exists():
        kept = torch.load(file, weights_only=True, mmap=True)
        if kept.pop("of") == of:
            return Told(**kept)
    with torch.inference_mode():
        made: Told = _computed(settings)
    torch.save(made._asdict() | {"of": of}, file)
    return made


def _computed(settings: Settings) -> Told:
    from workers.families.painter.text import States

    prompts = list(islice(training(Random(settings.seed)), settings.prompts))
    model = States(settings.language_model, settings.layers, settings.max_tokens, device="cpu")
    progress, rows, pooled = Progress("states", len(prompts)), [], []
    for first in range(0, len(prompts), 200):
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.bfloat16):
            some, means = model([prompt.text for prompt in prompts[first : first + 200]])
        rows.append(some.half())
        pooled.append(means.float())
        progress.at(min(first + 200, len(prompts)))
    everything = torch.cat(rows)
    words = everything[:2000].float().flatten(0, 1)
    words = words[words.abs().sum(1) > 0]
    return Told(
        everything,
        torch.cat(pooled),
        torch.tensor([as_numbers(prompt.asked) for prompt in prompts]),
        words.mean(0),
        words.std(0),
    )
