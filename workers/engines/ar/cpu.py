"""How many threads a step gets on a CPU."""

from __future__ import annotations

import os

import torch

from workers.engines.vllm_setup import cpu_threads


class Threads:
    """How many threads torch uses, step by step.

    Few rows are read about as fast by one thread as by all, and the other stages of a pipeline want cores
    too. A prompt's products gain by each core, and the stages behind have nothing to do until it is read. But
    where rows stream in, the stage that makes them computes meanwhile: with more threads than free cores each
    of a step's many operations waits for the thread that has none.

    Args:
        fixed: As the stage's setting says, for all steps; 0: by what a step computes.
    """

    _MANY_ROWS = 64

    def __init__(self, fixed: int) -> None:
        cores = len(os.sched_getaffinity(0))
        self._few = fixed or cpu_threads()
        self._many = fixed or cores
        self._now = 0

    def use(self, rows: int, *, streamed: bool) -> None:
        """For the step to come.

        Args:
            rows: So many it has.
            streamed: Whether some of its jobs get rows from a stage that is still at work.
        """
        wanted = self._many if rows >= self._MANY_ROWS and not streamed else self._few
        if wanted != self._now:
            torch.set_num_threads(wanted)
            self._now = wanted
