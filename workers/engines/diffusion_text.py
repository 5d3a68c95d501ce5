"""Engine ``diffusion-text``: prompts to what a denoiser is conditioned on.

All prompts of a request, the positive and the negative one, are computed in one pass, together with those of
other requests that wait. A prompt that is there twice (several pictures of one text) is computed once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Sequence

from adapters.chunk import Payload
from pipelines.graph import Stage
from pipelines.options import DiffusionTextOptions, options_of
from workers.batching import BatchingEngine
from workers.engine import OUT, Job
from workers.engines.diffusion.family import Conditions, Prompt, TextEncoder
from workers.engines.diffusion.requests import request_of
from workers.families.find import find_class
from workers.families.libraries import load_diffusers

Prompts = Sequence[Prompt]


class DiffusionTextEngine(BatchingEngine[Prompts, list[Conditions]]):
    """Requests {"prompt", ...} in; for each of their prompts {"branch", and tensors by name} out."""

    _encoder: TextEncoder

    def __init__(self, stage: Stage, *, device: str) -> None:
        super().__init__(stage, device=device)
        self.options = options_of(stage, DiffusionTextOptions)

    def load(self) -> None:
        """Loads the encoders. Raises MissingLibrary, ModelError, or ValueError for what is no checkpoint."""
        load_diffusers(self.stage)
        family = find_class(self.options.family)
        self._encoder = family(self.stage.model or "", self.options, self.device)

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """Encodes one request's prompts."""
        prompts = self._encoder.prompts(await request_of(job, self._encoder.wishes))
        if job.emitted >= len(prompts):
            return
        encoded = await self.submit(prompts)
        for number, (prompt, conditions) in enumerate(zip(prompts, encoded, strict=True)):
            yield OUT if number < job.emitted else {"branch": prompt.branch, **conditions}

    def forward(self, items: Sequence[Prompts]) -> list[list[Conditions] | Exception]:
        """One pass over the prompts of some requests."""
        import torch

        distinct = {_same(prompt): prompt for prompts in items for prompt in prompts}
        with torch.inference_mode():
            encoded = dict(zip(distinct, self._encoder.encode(list(distinct.values())), strict=True))
        return [[encoded[_same(prompt)] for prompt in prompts] for prompts in items]


def _same(prompt: Prompt) -> Hashable:
    """Prompts that agree in this are one. Those with pictures are not compared."""
    return (prompt.branch, prompt.text) if not prompt.images else id(prompt)
