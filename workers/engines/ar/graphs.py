"""CUDA graphs of steps in which every job computes a single row.

Such a step launches hundreds of small kernels, and on a GPU launching takes longer than computing. A graph is
captured once for each batch size and count of blocks (both rounded up), on first use, and replayed after its
inputs were written over those of the capture. Where a compiler for torch.compile is at hand, the pass is
compiled first.
"""

from __future__ import annotations

from typing import Any

import torch

from workers.engines.ar.attention import PagedStep, Pages
from workers.engines.ar.family import Forward, Model


class Graphs:
    """Captures and replays.

    Args:
        model: On a CUDA device.
        pages: Its memory.
        sizes: Batch sizes, rising.
        max_blocks: Blocks of the longest job.
    """

    def __init__(self, model: Model, pages: Pages, sizes: list[int], max_blocks: int) -> None:
        self._model = model
        self._pages = pages
        self._sizes = sizes
        self._blocks = [size * max_blocks for size in sizes]
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._memory: Any = None  # one pool for all graphs; they never run at the same time

    def replay(self, embeds: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> Forward | None:
        """The pass over rows [D, hidden]; None where no graph is large enough. Valid until the next one."""
        size = next((size for size in self._sizes if size >= step.singles), None)
        if size is None:
            return None
        blocks = _rounded(len(step.owner))
        if (size, blocks) not in self._captured:
            inputs = embeds.new_zeros(size, embeds.shape[1]), positions.new_zeros(len(positions), size)
            captured = _Captured(self._model, *inputs, PagedStep.padded(self._pages, size, blocks))
            captured.capture(self._memory)
            self._memory = captured.graph.pool()
            self._captured[size, blocks] = captured
        return self._captured[size, blocks].run(embeds, positions, step)


def _rounded(blocks: int) -> int:
    """The next power of two, so that there are few graphs."""
    return max(8, 1 << (blocks - 1).bit_length())


class _Captured:
    """One graph and the buffers that it reads and writes."""

    def __init__(self, model: Model, embeds: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> None:
        self._model = model
        self._embeds = embeds
        self._positions = positions
        self._step = step
        self.graph = torch.cuda.CUDAGraph()

    def capture(self, memory: Any) -> None:
        """Runs the pass a few times beside the graph, as CUDA graphs want it, then into it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph, pool=memory):
            self._out = self._forward()

    def run(self, embeds: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> Forward:
        """Copies the inputs in, and replays."""
        rows = step.singles
        self._embeds[:rows] = embeds
        self._positions[:, :rows] = positions
        self._step.fill(step)
        self.graph.replay()
        return Forward(self._out.last[:rows], self._out.hidden)

    def _forward(self) -> Forward:
        return self._model.forward(self._embeds, self._positions, self._step, {})
