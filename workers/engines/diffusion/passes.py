"""Passes of the transformer: which rows go together, and what was said of each."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from adapters.chunk import Payload
from workers.engines.diffusion.caches.cache import Cache
from workers.engines.diffusion.family import Canvas, Denoiser, Row, Wishes
from workers.engines.engine_thread import is_fatal

if TYPE_CHECKING:
    import torch

log = logging.getLogger("engine")

#: What the transformer said of each row, [1, ...] in the shape of the latents, or why it could not.
Said = dict[Row, "torch.Tensor | Exception"]


class Transformer(Protocol):
    """Computes rows: in this process (:class:`Passes`), or with a second one (``ParallelPasses``)."""

    def begin(
        self, canvas: Canvas, inputs: Mapping[str, list[Payload]], wishes: Wishes, seed: int, state: Payload
    ) -> None:
        """A canvas joins, with what it was begun with; ``state``: what :meth:`state` gave, or empty."""
        ...

    def __call__(self, rows: Sequence[Row]) -> Said:
        """What is said of these rows, each at its canvas' own step."""
        ...

    def state(self, rows: Sequence[Row]) -> Payload:
        """What is kept of a canvas' rows beside the canvas, for a checkpoint."""
        ...

    def forget(self, canvas: Canvas) -> None:
        """A canvas has left."""
        ...

    def close(self) -> None:
        """Nothing is computed any more."""
        ...


class Passes:
    """Computes the rows of a step.

    Args:
        denoiser: Loaded.
        max_rows: Of one pass.
        sequential: The branches of a canvas never share a pass.
        cache: Answers for some rows; None: none.
    """

    def __init__(
        self, denoiser: Denoiser, max_rows: int, *, sequential: bool = False, cache: Cache | None = None
    ) -> None:
        self.cache = cache
        self._denoiser = denoiser
        self._max_rows = max_rows
        self._sequential = sequential
        self._forward = denoiser.forward if cache is None else cache.forward

    def begin(
        self, canvas: Canvas, inputs: Mapping[str, list[Payload]], wishes: Wishes, seed: int, state: Payload
    ) -> None:
        """Of all this only the state matters here."""
        self.restore(canvas.rows, state)

    def __call__(self, rows: Sequence[Row]) -> Said:
        """All of them."""
        said: Said = {}
        for group in self._groups(rows):
            for start in range(0, len(group), self._max_rows):
                said |= self._compute(group[start : start + self._max_rows])
        return said

    def state(self, rows: Sequence[Row]) -> Payload:
        """What the cache keeps of them: "branch/name" -> value."""
        if self.cache is None:
            return {}
        return {
            f"{row.branch}/{name}": value for row in rows for name, value in self.cache.state(row).items()
        }

    def restore(self, rows: Sequence[Row], state: Payload) -> None:
        """Puts back what :meth:`state` gave, of these rows."""
        if self.cache is None:
            return
        for row in rows:
            start = f"{row.branch}/"
            self.cache.restore(
                row, {name[len(start) :]: value for name, value in state.items() if name.startswith(start)}
            )

    def forget(self, canvas: Canvas) -> None:
        """The cache forgets it."""
        for row in canvas.rows:
            if self.cache is not None:
                self.cache.forget(row)

    def close(self) -> None:
        """There is nothing to let go of."""

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
            return dict(zip(rows, self._forward(rows).split(1), strict=True))
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
