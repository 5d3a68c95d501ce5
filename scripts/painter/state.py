"""The state of a training: kept every minute, found again after an interruption."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from scripts.painter.settings import Settings


class Keeper:
    """Keeps a state in a file.

    Args:
        file: Where.
        part: Of the settings, see :meth:`Settings.of`; a state of other settings is not used.
        settings: Those of the run.
    """

    def __init__(self, file: Path, part: str, settings: Settings) -> None:
        self._file = file
        self._of = repr(settings.of(part))
        self._every_s = settings.save_s
        self._saved = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """The state that was kept; None at the beginning."""
        if not self._file.exists():
            return None
        state: dict[str, Any] = torch.load(self._file, weights_only=True)
        if state.pop("of") != self._of:
            raise SystemExit(f"{self._file} is of a run with other settings; remove it, or go back to those")
        return state

    @property
    def due(self) -> bool:
        """Whether the last one is old enough."""
        return time.monotonic() - self._saved >= self._every_s

    def save(self, state: dict[str, Any]) -> None:
        """Keeps it in the place of the one before."""
        partial = self._file.with_suffix(".part")
        torch.save(state | {"of": self._of}, partial)
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
        if now - self._said < 5 and step < self._steps:
            return
        self._said = now
        left = (now - self._began[0]) / max(1, step - self._began[1]) * (self._steps - step)
        said = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
        print(
            f"{self._what}: step {step} of {self._steps}, {said}, {left / 60:.1f} min left", file=sys.stderr
        )


def rate(step: int, steps: int, settings: Settings) -> float:
    """Share of the learning rate: a linear warm-up, a plain, and a linear way down at the end.

    So a run can be made longer as long as it is not on the way down.
    """
    down = (steps - step) / (steps * settings.down)
    return min(1.0, (step + 1) / settings.warm_up, max(0.02, down))
