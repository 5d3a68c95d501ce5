"""The engine's thread: it alone touches the model, the scheduler and the memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workers.engines.ar.family import Step
from workers.engines.ar.schedule import Scheduler
from workers.engines.ar.sequence import AHEAD, Sequence
from workers.engines.engine_thread import EngineThread
from workers.optional import library

if TYPE_CHECKING:
    from workers.engines.ar.runner import Runner


class ArThread(EngineThread):
    """Steps while there is something to compute, sleeps otherwise. Commands are obeyed between two steps.

    Args:
        build: Loads everything, on the thread.
        company_s: How long a step waits for running jobs that have nothing to compute yet, since the next row
            of their streaming edge has not come. It costs about the same for one job as for all.
    """

    runner: Runner  #: after :meth:`start`
    scheduler: Scheduler

    def __init__(self, build: Callable[[], tuple[Runner, Scheduler]], company_s: float = 0.0) -> None:
        super().__init__("ar")
        self._build = build
        self._company_s = company_s

    def add(self, sequence: Sequence) -> None:
        """A job to compute; its sink gets the steps."""
        self.command(lambda: self.scheduler.add(sequence))

    def remove(self, sequence: Sequence) -> None:
        """Nobody wants the rest of it; its memory is free before the next step."""
        self.command(lambda: self.scheduler.remove(sequence))

    def feed(self, sequence: Sequence, rows: list[Any], *, ended: bool) -> None:
        """Further rows of a streaming edge, [hidden] each."""

        def command() -> None:
            sequence.rows += rows
            sequence.rows_ended = ended

        self.command(command)

    def took(self, sequence: Sequence) -> None:
        """A step of the job was looked at. One that waited for this goes on."""
        sequence.taken += 1
        if sequence.made - sequence.taken == AHEAD - 1:
            self.command(lambda: None)

    # --- on the thread

    def load(self) -> None:
        """Builds everything."""
        torch = library("torch", "cpu")
        with torch.inference_mode():
            self.runner, self.scheduler = self._build()

    def serve(self) -> None:
        """Steps while there is something to compute."""
        import torch

        with torch.inference_mode():
            self._serve()

    def _serve(self) -> None:
        busy = True
        while self.obey(0.0 if busy else None) and self._gather():
            busy = self._step()

    def _step(self) -> bool:
        """False: there is nothing to compute.

        A method, because a loop's variables would hold the last job, and with it its rows in other processes'
        memory, for as long as nothing else comes.
        """
        pieces = self.scheduler.plan()
        if not pieces:
            return False
        outcome = self.runner.step(pieces)
        for sequence, result in outcome.items():
            if isinstance(result, Exception) or result.finish is not None:
                self.scheduler.remove(sequence)
        if outcome:
            self.tell(_deliver, outcome)
        return True

    def _gather(self) -> bool:
        """Waits for company. False: stop."""
        if not self._company_s:
            return True
        until = time.monotonic() + self._company_s
        while self.scheduler.scattered and (left := until - time.monotonic()) > 0:
            if not self.obey(left):
                return False
        return True


def _deliver(outcome: dict[Sequence, Step | Exception]) -> None:
    for sequence, result in outcome.items():
        sequence.sink.put_nowait(result)
