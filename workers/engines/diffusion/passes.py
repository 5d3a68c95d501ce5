"""Passes of the transformer: which rows go together, and what was said of each."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from workers.engines.diffusion.family import Canvas, Denoiser, Row
from workers.engines.engine_thread import is_fatal

if TYPE_CHECKING:
    import torch

log = logging.getLogger("engine")

#: What the transformer said of each row, [1, ...] in the shape of the latents, or why it could not.
Said = dict[Row, "torch.Tensor | Exception"]


class Passes:
    """Computes the rows of a step.

    Args:
        denoiser: Loaded.
        max_rows: Of one pass.
        sequential: The branches of a canvas never share a pass.
    """

    def __init__(self, denoiser: Denoiser, max_rows: int, *, sequential: bool) -> None:
        self._denoiser = denoiser
        self._max_rows = max_rows
        self._sequential = sequential

    def __call__(self, canvases: Sequence[Canvas]) -> Said:
        """All rows of these canvases, each at its canvas' own step."""
        said: Said = {}
        for rows in self._groups([row for canvas in canvases for row in canvas.rows]):
            for start in range(0, len(rows), self._max_rows):
                said |= self._compute(rows[start : start + self._max_rows])
        return said

    def _groups(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Rows that agree, in order of arrival."""
        groups: dict[Hashable, list[Row]] = {}
        for row in rows:
            branch = row.branch if self._sequential else None
            groups.setdefault((self._denoiser.key(row), branch), []).append(row)
        return list(groups.values())

    def _compute(self, rows: list[Row]) -> Said:
        """One pass. If it raises, the rows are computed one by one, and those fail that raise alone."""
        try:
            return dict(zip(rows, self._denoiser.forward(rows).split(1), strict=True))
        except Exception as error:
            if is_fatal(error):
                raise
            if len(rows) == 1:
                return {rows[0]: error}
            log.warning("a pass failed, its rows are computed one by one", exc_info=True)
        said: Said = {}
        for row in rows:
            said |= self._compute([row])
        return said
