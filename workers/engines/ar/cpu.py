"""What the engine does for CPUs: how weights lie in memory, and how many threads a step gets."""

from __future__ import annotations

import os

import torch
from torch import nn

from workers.engines.ar.family import Model
from workers.engines.vllm_setup import cpu_threads


def by_columns(model: Model) -> None:
    """Stores the weights of all float32 linear layers of a model column by column.

    A linear layer multiplies by the transpose of its weight. The CPU's matrix product is up to 2.5 times as
    fast for a few rows, as many as there are jobs, where that transpose lies in memory as it is read. A
    weight that is an embedding, too, is copied: rows are looked up there.
    """
    modules = [
        part for whole in vars(model).values() if isinstance(whole, nn.Module) for part in whole.modules()
    ]
    looked_up = {id(part.weight) for part in modules if isinstance(part, nn.Embedding)}
    for linear in {id(part): part for part in modules if isinstance(part, nn.Linear)}.values():
        weight = linear.weight.data
        if weight.dtype != torch.float32:
            continue
        columns = weight.t().contiguous().t()
        if id(linear.weight) in looked_up:
            linear.weight = nn.Parameter(columns, requires_grad=False)
        else:
            linear.weight.data = columns


class Threads:
    """How many threads torch uses, step by step.

    Few rows are read about as fast by one thread as by all, and the other stages of a pipeline want cores
    too. A prompt's products gain by each core, and the stages behind have nothing to do until it is read.

    Args:
        fixed: As the stage's setting says, for all steps; 0: by what a step computes.
    """

    _MANY_ROWS = 64

    def __init__(self, fixed: int) -> None:
        cores = len(os.sched_getaffinity(0))
        self._few = fixed or cpu_threads()
        self._many = fixed or cores
        self._now = 0

    def use(self, rows: int) -> None:
        """For the step to come."""
        wanted = self._many if rows >= self._MANY_ROWS else self._few
        if wanted != self._now:
            torch.set_num_threads(wanted)
            self._now = wanted
