"""One job inside the engine: its canvas, what is due after which step, and who hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from adapters.chunk import Payload
from workers.engine import Job
from workers.engines.diffusion.family import Canvas, Denoiser, Wishes
from workers.engines.diffusion.passes import Transformer

#: Before the names of what is kept of the rows, in a checkpoint.
_CACHE = "cache/"


class Made(NamedTuple):
    """What a step made for a job, if there is anything to say of it."""

    payload: Payload | None = None  #: goes out
    state: Payload | None = None  #: a checkpoint, after the payload
    last: bool = False  #: nothing more comes


class Painting:
    """Made by the event loop, changed by the engine's thread alone.

    Payloads are numbered: the partial pictures in the order of their steps, then the last one. A new attempt
    computes those after its checkpoint again and gives out what is not out yet.
    """

    def __init__(self, job: Job, inputs: Mapping[str, list[Payload]], wishes: Wishes) -> None:
        self.name = job.name
        self.sink: asyncio.Queue[Made | Exception] = asyncio.Queue()
        self._inputs: Mapping[str, list[Payload]] = inputs
        self._wishes = wishes
        self._seed = job.seed
        self._emitted = job.emitted
        self._state = job.resume_state
        self._partials: list[int] = []  #: the steps after which a partial picture is due
        self._kept_at = 0  #: the step of the last checkpoint
        self.canvas: Canvas  #: after :meth:`begin`

    def begin(self, denoiser: Denoiser, passes: Transformer) -> None:
        """Makes the canvas, where an earlier attempt left it if there was one."""
        canvas = self.canvas = denoiser.begin(self._inputs, self._wishes, self._seed)
        self._partials = partial_steps(canvas.step, canvas.steps, self._wishes.partial_images)
        if self._state is not None:
            canvas.step = self._kept_at = self._state["step"]
            denoiser.restore(canvas, self._state)
        kept = {
            name.removeprefix(_CACHE): value
            for name, value in (self._state or {}).items()
            if name.startswith(_CACHE)
        }
        passes.begin(canvas, self._inputs, self._wishes, self._seed, kept)
        # The canvas has what it needs of them, and they may be views of blocks that others wait for.
        self._inputs, self._state = {}, None

    @property
    def over(self) -> bool:
        """All of it is out."""
        return self._emitted > len(self._partials)

    def partial(self) -> int | None:
        """The number of the partial picture that the step in hand gives, if it is not out yet."""
        step = self.canvas.step + 1
        number = self._partials.index(step) if step in self._partials else None
        return None if number is None or number < self._emitted else number

    def checkpoint(self, denoiser: Denoiser, passes: Transformer, every: int) -> Payload | None:
        """A state, if one is due. One that nobody has taken yet makes the next wait."""
        step = self.canvas.step
        if step - self._kept_at < every or step == self.canvas.steps or not self.sink.empty():
            return None
        self._kept_at = step
        caches = {_CACHE + name: value for name, value in passes.state(self.canvas.rows).items()}
        progress = step / self.canvas.steps  # for those who ask the broker how far it is
        return {"step": step, "progress": progress, **denoiser.state(self.canvas), **caches}


def partial_steps(first: int, steps: int, count: int) -> list[int]:
    """The numbers of steps after which partial pictures are due: evenly spread, none after the last step.

    Args:
        first: Steps that are left out at the beginning.
        steps: In all.
        count: Pictures wanted. There are fewer where there are fewer steps.
    """
    spread = [first + round((steps - first) * number / (count + 1)) for number in range(1, count + 1)]
    return sorted({step for step in spread if first < step < steps})
