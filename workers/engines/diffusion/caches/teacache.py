"""TeaCache (Liu et al. 2024, "Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model").

What a transformer's blocks add to the embedded latents changes little between some steps. How much it will
have changed can be told, before they run, from what their first one is about to look at: the relative L1
distance to the same of the step before, put through a polynomial that is fitted for each model. These
estimates add up from step to step; as long as the sum stays below the threshold, what the blocks added when
they last ran is added again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from adapters.chunk import Payload
from workers.engines.diffusion.caches.blocks import Blocks
from workers.engines.diffusion.caches.cache import Window
from workers.engines.diffusion.family import Denoiser, Row
from workers.engines.diffusion.tensors import as_tensor, copied


class Past(NamedTuple):
    """What is kept of a row."""

    transformer: int  #: the one that computed it
    modulated: torch.Tensor  #: what its first block looked at in the last step, [1, tokens, width]
    added: torch.Tensor  #: what the blocks added when they last ran, [1, tokens, width]
    distance: float  #: how much that may have changed since


class TeaCache:
    """For one denoiser.

    Args:
        denoiser: Loaded.
        threshold: The blocks run again when the estimates add up to it. 0: in every step.
        window: The steps in which they may be left out.
        coefficients: Of the polynomial, the highest power first.

    Raises ValueError as :class:`Blocks` does, and without coefficients.
    """

    def __init__(
        self, denoiser: Denoiser, threshold: float, window: Window, coefficients: Sequence[float]
    ) -> None:
        if not coefficients:
            raise ValueError(
                "options.cache_coefficients: TeaCache needs them, and this pipeline names none; "
                "scripts/calibrate_teacache finds them"
            )
        self.skipped = 0  #: rows whose blocks did not run
        self.computed = 0  #: rows whose blocks ran
        self._denoiser = denoiser
        self._blocks = Blocks(denoiser.transformers)
        self._threshold = threshold
        self._window = window
        self._coefficients = tuple(coefficients)

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """[rows, ...]. Rows that leave the blocks out are not in the pass of those that don't."""
        try:
            return self._pass(rows, None)
        except _Disagree as disagreement:
            said: dict[Row, torch.Tensor] = {}
            for skips in (False, True):
                distances = {row: left for row, left in disagreement.distances.items() if bool(left) is skips}
                group = list(distances)
                said |= dict(zip(group, self._pass(group, distances).split(1), strict=True))
            return torch.cat([said[row] for row in rows])

    def state(self, row: Row) -> Payload:
        """Empty before the first step."""
        past: Past | None = row.canvas.caches.get(row.branch)
        return {} if past is None else {name: copied(value) for name, value in past._asdict().items()}

    def restore(self, row: Row, state: Payload) -> None:
        """Puts back what :meth:`state` gave."""
        if state:
            like = row.canvas.latents.device
            tensors = {name: as_tensor(state[name]).clone().to(like) for name in ("modulated", "added")}
            row.canvas.caches[row.branch] = Past(**{**state, **tensors})

    def forget(self, row: Row) -> None:
        """Nothing is kept but in the canvas."""

    def _pass(self, rows: Sequence[Row], distances: dict[Row, float] | None) -> torch.Tensor:
        crossing = _Crossing(self, rows, distances)
        with self._blocks.heard_by(crossing):
            said = self._denoiser.forward(rows)
        # Only now: a pass that fails leaves all as it was, and is tried again row by row.
        for row, past in zip(rows, crossing.pasts, strict=True):
            row.canvas.caches[row.branch] = past
        self.skipped += len(rows) if crossing.skips else 0
        self.computed += 0 if crossing.skips else len(rows)
        return said

    def distances(self, rows: Sequence[Row], transformer: int, modulated: torch.Tensor) -> dict[Row, float]:
        """Of each row, what its estimates add up to if its blocks are left out now; 0: they have to run."""
        pasts: list[Past | None] = [row.canvas.caches.get(row.branch) for row in rows]
        found = dict.fromkeys(rows, 0.0)
        changes: list[torch.Tensor] = []
        known: list[tuple[Row, Past]] = []
        for row, past, now in zip(rows, pasts, modulated.split(1), strict=True):
            if past is not None and past.transformer == transformer and self._window.allows(row.canvas):
                known.append((row, past))
                changes.append(relative_change(past.modulated, now))
        if known:
            # The device is waited for once.
            for (row, past), change in zip(known, torch.stack(changes).tolist(), strict=True):
                distance = past.distance + max(polynomial(self._coefficients, change), 0.0)
                if distance < self._threshold:
                    found[row] = max(distance, _LEAST)
        return found


#: Stands for a distance of nothing, where 0 means that there is none.
_LEAST = 1e-12


class _Disagree(Exception):
    """Some rows of a pass can leave the blocks out, and some can't."""

    def __init__(self, distances: dict[Row, float]) -> None:
        super().__init__("not all rows of a pass leave its blocks out")
        self.distances = distances


class _Crossing:
    """One pass. ``distances``: as decided before; None: to be decided, which may end the pass."""

    def __init__(self, cache: TeaCache, rows: Sequence[Row], distances: dict[Row, float] | None) -> None:
        self.skips = False
        self.pasts: list[Past] = []
        self._cache = cache
        self._rows = rows
        self._distances = distances
        self._modulated: tuple[torch.Tensor, ...] = ()

    def enter(self, transformer: int, modulated: torch.Tensor) -> torch.Tensor | None:
        rows, distances = self._rows, self._distances
        if distances is None:
            distances = self._cache.distances(rows, transformer, modulated)
            if len({bool(distance) for distance in distances.values()}) > 1:
                raise _Disagree(distances)
        self._modulated = modulated.split(1)
        self.skips = bool(distances[rows[0]])
        if not self.skips:
            return None
        pasts: list[Past] = [row.canvas.caches[row.branch] for row in rows]
        self.pasts = [
            past._replace(modulated=now, distance=distances[row])
            for row, past, now in zip(rows, pasts, self._modulated, strict=True)
        ]
        return torch.cat([past.added for past in pasts])

    def leave(self, transformer: int, added: torch.Tensor) -> None:
        self.pasts = [
            Past(transformer, now, of_row, 0.0)
            for now, of_row in zip(self._modulated, added.split(1), strict=True)
        ]


def relative_change(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """The relative L1 distance, 0-d, float32."""
    before, after = before.float(), after.float()
    return (after - before).abs().mean() / before.abs().mean()


def polynomial(coefficients: Sequence[float], value: float) -> float:
    """Its value; the highest power comes first."""
    result = 0.0
    for coefficient in coefficients:
        result = result * value + coefficient
    return result
