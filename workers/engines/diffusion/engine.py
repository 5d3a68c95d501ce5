"""Engine ``diffusion``: a denoiser with continuous batching at the level of the step.

Each request stands at its own step, with its own schedule, seed and guidance; requests join and leave between
two steps. What a request becomes depends on its inputs and its seed alone, up to the rounding of passes of
different sizes. A new attempt goes on from the last checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from adapters.chunk import Payload
from pipelines.graph import Stage
from pipelines.options import DiffusionOptions, options_of
from workers.engine import ItemError, Job
from workers.engines.diffusion.painting import Painting
from workers.engines.diffusion.thread import DiffusionThread
from workers.params import checked

if TYPE_CHECKING:
    from workers.engines.diffusion.runner import Runner

log = logging.getLogger("engine")

#: Of guidance; some families have them, beside ``guidance_scale``.
SCALES = ("true_cfg_scale", "guidance_scale_2")


class DiffusionEngine:
    """Conditions in, latents out: perhaps some of pictures on the way ("partial": i), then the last ones."""

    resumes = True

    def __init__(self, stage: Stage, *, device: str) -> None:
        self.options = options_of(stage, DiffusionOptions)
        self.stage = stage
        self.device = device
        self.thread = DiffusionThread(self._build, stage.batch.max_num_seqs)

    async def start(self) -> None:
        """Loads the model. Raises MissingLibrary, ModelError, ValueError, or what the family raises."""
        began = time.monotonic()
        await self.thread.start()
        log.info("diffusion is ready: model %s, %.1f s", self.stage.model, time.monotonic() - began)

    async def stop(self) -> None:
        """Ends the thread; the model goes with this object."""
        await self.thread.stop()

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """Paints one job. Raises ItemError (400) for parameters that the family can't follow."""
        kind = self.thread.runner.denoiser.wishes
        for name in SCALES:  # all stages get all parameters; this one knows which of these there are
            if job.params.get(name) is not None and name not in kind.__struct_fields__:
                raise ItemError(f"{name}: this model has no such scale", status=400, param=name)
        wishes = checked(job.params, kind)
        inputs = {producer: await job.gather(producer) for producer in job.inputs}
        painting = Painting(job, inputs, wishes)
        del inputs  # the painting lets go of them once it has begun
        self.thread.add(painting)
        try:
            while True:
                made = await painting.sink.get()
                if isinstance(made, Exception):
                    raise made
                if made.payload is not None:
                    yield made.payload
                if made.last:
                    return
                if made.state is not None:
                    await job.checkpoint(made.state)
        finally:
            self.thread.remove(painting)

    # --- on the thread

    def _build(self) -> Runner:
        from workers.engines.diffusion.build import build
        from workers.engines.diffusion.runner import Runner

        first, *others = self.device.split(",")
        if self.options.cfg != "parallel":
            return Runner(*build(self.stage, first), self.options.checkpoint_steps)
        from workers.engines.diffusion.parallel import ParallelPasses, Rank

        rank = Rank(self.stage, others[0] if others else first)  # both load at the same time
        try:
            denoiser, passes = build(self.stage, first)
            rank.ready()
        except BaseException:
            rank.process.kill()
            rank.close()
            raise
        return Runner(denoiser, ParallelPasses(passes, rank), self.options.checkpoint_steps)
