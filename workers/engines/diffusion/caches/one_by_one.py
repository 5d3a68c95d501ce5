"""Caches of other libraries: they know contexts by name and passes of one request, so each row has a context
and a pass of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from adapters.chunk import Payload
from workers.engines.diffusion.caches.cache import Window
from workers.engines.diffusion.family import Denoiser, Row

if TYPE_CHECKING:
    import torch


class OneByOne(ABC):
    """A library's cache around a denoiser. Where the window is closed, a row begins anew."""

    def __init__(self, denoiser: Denoiser, window: Window) -> None:
        if not denoiser.transformers:
            raise ValueError("options.cache: this family has no caches")
        self._denoiser = denoiser
        self._window = window

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """[rows, ...]"""
        import torch

        return torch.cat([self._one(row) for row in rows])

    @abstractmethod
    def state(self, row: Row) -> Payload:
        """What the library keeps of a row; tensors in it are copies on the CPU."""

    @abstractmethod
    def restore(self, row: Row, state: Payload) -> None:
        """Puts back what :meth:`state` gave."""

    @abstractmethod
    def forget(self, row: Row) -> None:
        """The library forgets a row."""

    @abstractmethod
    def _within(self, row: Row) -> torch.Tensor:
        """The pass of one row in its context."""

    def _one(self, row: Row) -> torch.Tensor:
        if not self._window.allows(row.canvas):
            self.forget(row)
        try:
            return self._within(row)
        except Exception:
            self.forget(row)  # whatever it knows is of half a pass
            raise


def name_of(row: Row) -> str:
    """Of its context: unique while its canvas lives."""
    return f"{id(row.canvas)}/{row.branch}"
