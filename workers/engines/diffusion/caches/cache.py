"""What all caches have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from adapters.chunk import Payload
from workers.engines.diffusion.family import Canvas, Row

if TYPE_CHECKING:
    import torch


class Cache(Protocol):
    """Stands between the passes and the denoiser."""

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """As :meth:`Denoiser.forward`, perhaps with less work."""
        ...

    def state(self, row: Row) -> Payload:
        """What is kept of a row, for a checkpoint; tensors in it are copies on the CPU."""
        ...

    def restore(self, row: Row, state: Payload) -> None:
        """Puts back what :meth:`state` gave."""
        ...

    def forget(self, row: Row) -> None:
        """The row has left."""
        ...


class Window(NamedTuple):
    """The steps in which a cache may be used, as shares of all steps; never the first one and the last."""

    start: float
    end: float

    def allows(self, canvas: Canvas) -> bool:
        """Whether the step that comes next is among them."""
        inner = 0 < canvas.step < canvas.steps - 1
        return inner and self.start * canvas.steps <= canvas.step < self.end * canvas.steps
