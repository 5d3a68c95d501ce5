"""The engine's thread: canvases come and go between two steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from workers.engines.diffusion.painting import Made, Painting
from workers.engines.engine_thread import EngineThread, is_fatal

if TYPE_CHECKING:
    from workers.engines.diffusion.runner import Outcome, Runner


class DiffusionThread(EngineThread):
    """Steps while there are canvases, sleeps otherwise.

    Args:
        build: Loads the model, on the thread.
        max_canvases: At once; others wait, oldest first.
    """

    runner: Runner  #: after :meth:`start`

    def __init__(self, build: Callable[[], Runner], max_canvases: int) -> None:
        super().__init__("diffusion")
        self._build = build
        self._max_canvases = max_canvases
        self._running: list[Painting] = []
        self._waiting: list[Painting] = []

    def add(self, painting: Painting) -> None:
        """A job to paint; its sink hears of it."""
        self.command(lambda: self._waiting.append(painting))

    def remove(self, painting: Painting) -> None:
        """Nobody wants the rest of it; it is gone before the next step."""
        self.command(lambda: self._drop(painting))

    # --- on the thread

    def load(self) -> None:
        """Builds everything."""
        self.runner = self._build()

    def serve(self) -> None:
        """Steps while there are canvases."""
        import torch

        with torch.inference_mode(), closing(self.runner.passes):
            while self.obey(0.0 if self._running or self._waiting else None):
                self._turn()

    def _turn(self) -> None:
        """A step of all that there are. Its variables end with it: those of :meth:`serve` would hold the last
        painting, and with it blocks of shared memory, for as long as nothing else comes."""
        outcome = self._admit()
        if self._running:
            outcome |= self.runner.step(self._running)
        for painting, made in outcome.items():
            if isinstance(made, Exception) or made.last:
                self._drop(painting)
        if outcome:
            self.tell(_deliver, outcome)

    def _admit(self) -> Outcome:
        """Begins those that have waited and now have a place. Says which can't begin, or are over."""
        outcome: Outcome = {}
        while self._waiting and len(self._running) < self._max_canvases:
            painting = self._waiting.pop(0)
            try:
                painting.begin(self.runner.denoiser, self.runner.passes)
            except Exception as error:
                if is_fatal(error):
                    raise
                outcome[painting] = error
            else:
                self._running.append(painting)
                if painting.over:
                    self._drop(painting)
                    outcome[painting] = Made(last=True)
        return outcome

    def _drop(self, painting: Painting) -> None:
        if painting in self._waiting:
            self._waiting.remove(painting)
        if painting in self._running:
            self._running.remove(painting)
            self.runner.passes.forget(painting.canvas)


def _deliver(outcome: Outcome) -> None:
    for painting, made in outcome.items():
        painting.sink.put_nowait(made)
