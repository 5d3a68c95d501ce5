"""CUDA graphs of steps in which every job computes a single row.

Such a step launches hundreds of small kernels, and on a GPU launching takes longer than computing. A graph is
captured once for each batch size and count of blocks (both rounded up), and replayed after its inputs were
written over those of the capture. The pass is compiled first (torch.compile); one that torch can't compile is
captured as it is, and one that can't be captured runs kernel by kernel; the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from workers.engines.ar.attention import PagedStep, Pages
from workers.engines.ar.family import Forward, Model

log = logging.getLogger("engine")


class Graphs:
    """Captures and replays.

    Args:
        model: On a CUDA device.
        pages: Its memory.
        sizes: Batch sizes, rising. Larger steps have no graph.
    """

    def __init__(self, model: Model, pages: Pages, sizes: list[int]) -> None:
        self._model = model
        self._pages = pages
        self._sizes = sizes
        self._captured: dict[tuple[int, int, torch.dtype], Captured] = {}
        self._forward: Callable[..., Forward] = torch.compile(model.forward, dynamic=True)
        self._memory: Any = None  # one pool for all graphs; they never run at the same time

    def prepare(self) -> None:
        """Compiles the pass and captures it for each batch size, with few blocks: the start may take long,
        requests not. Counts of blocks that come up later are captured when they do.
        """
        width, dtype = self._model.decoder.config.hidden_size, self._model.layout.dtype
        for size in list(self._sizes):
            embeds = torch.zeros(size, width, dtype=dtype, device=self._pages.device)
            positions = torch.zeros(self._model.axes, size, dtype=torch.long, device=self._pages.device)
            self.replay(embeds, positions, PagedStep.padded(self._pages, size, size))

    def replay(self, embeds: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> Forward | None:
        """The pass over rows [D, hidden], valid until the next one; None where there is no graph for it."""
        size = next((size for size in self._sizes if size >= step.singles), None)
        if size is None:
            return None
        kind = (size, rounded(len(step.owner)), positions.dtype)
        if kind not in self._captured:
            inputs = embeds.new_zeros(size, embeds.shape[1]), positions.new_zeros(len(positions), size)
            captured = Captured(*inputs, PagedStep.padded(self._pages, size, kind[1]))
            if not self._capture(captured):
                self._sizes = []
                return None
            self._captured[kind] = captured
        return self._captured[kind].run(embeds, positions, step)

    def _capture(self, captured: Captured) -> bool:
        try:
            captured.warm_up(self._forward)
        except Exception:
            if self._forward == self._model.forward:
                raise
            log.warning("torch.compile failed, the pass is captured as it is", exc_info=True)
            self._forward = self._model.forward
            return self._capture(captured)
        try:
            self._memory = captured.capture(self._forward, self._memory)
        except Exception:
            log.warning("no CUDA graph can be captured, steps run one kernel at a time", exc_info=True)
            return False
        return True


def rounded(blocks: int) -> int:
    """The next power of two, so that there are few graphs."""
    return max(8, 1 << (blocks - 1).bit_length())


class Captured:
    """One graph, and the buffers that it reads and writes."""

    def __init__(self, embeds: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> None:
        self._embeds = embeds
        self._positions = positions
        self._step = step

    def warm_up(self, forward: Callable[..., Forward]) -> None:
        """Runs the pass beside the graph: kernels are chosen, and buffers made, that a capture can't make."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._pass(forward)
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self, forward: Callable[..., Forward], memory: Any) -> Any:
        """Records the pass; returns the memory pool, for the graphs after it."""
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._out = self._pass(forward)
        return self._graph.pool()

    def run(self, embeds: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> Forward:
        """Copies the inputs in, and replays."""
        rows = step.singles
        self._embeds[:rows] = embeds
        self._positions[:, :rows] = positions
        self._step.fill(step)
        self._graph.replay()
        return Forward(self._out.last[:rows], self._out.hidden)

    def _pass(self, forward: Callable[..., Forward]) -> Forward:
        self._step.forget_biases()  # so that the pass computes them
        return forward(self._embeds, self._positions, self._step, {})
