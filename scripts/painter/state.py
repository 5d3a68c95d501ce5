"""The state of a training: kept every minute, found again after an interruption."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scripts.painter.settings import Settings


class Keeper:
    """Keeps a state in a file.

    Args:
        file: Where.
        settings: Those of the run; a state of other settings is not used.
    """

    def __init__(self, file: Path, settings: Settings) -> None:
        self._file = file
        self._settings = settings
        self._saved = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """The state that was kept; None at the beginning."""
        if not self._file.exists():
            return None
        state: dict[str, Any] = torch.load(self._file, weights_only=True)
        if state.pop("settings") != repr(self._settings):
            raise SystemExit(f"{self._file} is of a run with other settings; remove it, or go back to those")
        return state

    def save(self, state: Callable[[], dict[str, Any]], *, now: bool = False) -> None:
        """Keeps it, if the last one is old enough."""
        if now or time.monotonic() - self._saved >= self._settings.save_s:
            partial = self._file.with_suffix(".part")
            torch.save(state() | {"settings": repr(self._settings)}, partial)
            os.replace(partial, self._file)
            self._saved = time.monotonic()


class Progress:
    """A line now and then."""

    def __init__(self, what: str, steps: int) -> None:
        self._what = what
        self._steps = steps
        self._said = -1e9
        self._began: tuple[float, int] | None = None

    def at(self, step: int, **figures: float) -> None:
        """After a step."""
        now = time.monotonic()
        self._began = self._began or (now, step)
        if now - self._said < 10 and step < self._steps:
            return
        self._said = now
        left = (now - self._began[0]) / max(1, step - self._began[1]) * (self._steps - step)
        said = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
        print(
            f"{self._what}: step {step} of {self._steps}, {said}, {left / 60:.1f} min left", file=sys.stderr
        )


def rate(step: int, steps: int, settings: Settings) -> float:
    """Share of the learning rate: a linear warm-up, then half a cosine."""
    if step < settings.warm_up:
        return (step + 1) / settings.warm_up
    done = (step - settings.warm_up) / max(1, steps - settings.warm_up)
    return 0.5 * (1 + float(torch.cos(torch.tensor(done * torch.pi)))) * 0.98 + 0.02
