"""A step: what the transformer says of all canvases, and each of them one further. On the engine's thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adapters.chunk import Payload
from workers.engine import ItemError
from workers.engines.diffusion.family import Denoiser
from workers.engines.diffusion.painting import Made, Painting
from workers.engines.diffusion.passes import Said, Transformer
from workers.engines.engine_thread import is_fatal

#: What a step made of each painting of which there is something to say.
Outcome = dict[Painting, Made | Exception]


class Runner:
    """Takes steps.

    Args:
        denoiser: Loaded.
        passes: What computes its transformer's.
        checkpoint_steps: Between two checkpoints of a canvas.
    """

    def __init__(self, denoiser: Denoiser, passes: Transformer, checkpoint_steps: int) -> None:
        self.denoiser = denoiser
        self.steps = 0  #: taken so far
        self.passes = passes
        self._checkpoint_steps = checkpoint_steps

    def step(self, paintings: Sequence[Painting]) -> Outcome:
        """One step of each. What raises for one fails that one alone."""
        said = self.passes([row for painting in paintings for row in painting.canvas.rows])
        outcome: Outcome = {}
        partials: dict[Painting, Payload | None] = {}
        for painting in paintings:
            try:
                partials[painting] = self._advance(painting, said)
            except Exception as error:
                if is_fatal(error):
                    raise
                outcome[painting] = error
        for painting, sound in zip(partials, _sound(list(partials)), strict=True):
            outcome[painting] = self._made(painting, partials[painting]) if sound else _unsound(painting)
        self.steps += 1
        return outcome

    def _advance(self, painting: Painting, said: Said) -> Payload | None:
        """Takes a canvas one step further. Returns a partial picture, if one is due."""
        canvas = painting.canvas
        branches: dict[str, torch.Tensor] = {}
        for row in canvas.rows:
            result = said[row]
            if isinstance(result, Exception):
                raise result
            branches[row.branch] = result
        guided = self.denoiser.guide(canvas, branches)
        number = painting.partial()
        partial = None
        if number is not None:
            latents = self.denoiser.preview(canvas, guided)
            partial = {**self.denoiser.picture(canvas, latents), "partial": number}
        self.denoiser.advance(canvas, guided)
        canvas.step += 1
        return partial

    def _made(self, painting: Painting, partial: Payload | None) -> Made:
        canvas = painting.canvas
        if canvas.step == canvas.steps:
            return Made(self.denoiser.picture(canvas, canvas.latents), last=True)
        return Made(partial, painting.checkpoint(self.denoiser, self.passes, self._checkpoint_steps))


def _sound(paintings: Sequence[Painting]) -> list[bool]:
    """Whether the latents of each are finite. The device is waited for once."""
    if not paintings:
        return []
    flags = torch.stack([torch.isfinite(painting.canvas.latents).all() for painting in paintings])
    sound: list[bool] = flags.tolist()
    return sound


def _unsound(painting: Painting) -> ItemError:
    """The error for a canvas that holds NaN or infinity."""
    canvas = painting.canvas
    return ItemError(f"the latents after step {canvas.step} of {canvas.steps} are not finite")
