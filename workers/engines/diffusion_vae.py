"""Engine ``diffusion-vae``: latents to pixels, or with the option ``encodes`` a request's pictures to what a
denoiser is conditioned on.

What waits at the same time and agrees in shape shares a pass.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Sequence

from adapters.chunk import Payload
from pipelines.graph import Stage
from pipelines.options import DiffusionVaeOptions, options_of
from workers.batching import BatchingEngine
from workers.engine import OUT, Job
from workers.engines.diffusion.family import Request, Vae
from workers.engines.diffusion.requests import request_of
from workers.families.find import find_class
from workers.families.libraries import load_diffusers

Item = Request | Payload


class DiffusionVaeEngine(BatchingEngine[Item, Payload]):
    """{"latents", ...} in, {"image"} or {"frames", "fps"} out; with ``encodes`` requests in, one payload out.

    A payload's field "partial" goes along.
    """

    _vae: Vae

    def __init__(self, stage: Stage, *, device: str) -> None:
        super().__init__(stage, device=device)
        self.options = options_of(stage, DiffusionVaeOptions)

    def load(self) -> None:
        """Loads the VAE. Raises MissingLibrary, ModelError, or ValueError for what is no checkpoint."""
        load_diffusers(self.stage)
        family = find_class(self.options.family)
        if self.options.encodes and family.encode is Vae.encode:
            raise ValueError(f"options.encodes: {self.options.family} takes no pictures")
        self._vae = family(self.stage.model or "", self.options, self.device)

    def run(self, job: Job) -> AsyncIterator[Payload]:
        """One job. Raises ItemError."""
        return self._encoded(job) if self.options.encodes else self._decoded(job)

    async def _encoded(self, job: Job) -> AsyncIterator[Payload]:
        if not job.emitted:
            yield await self.submit(await request_of(job, self._vae.wishes))

    async def _decoded(self, job: Job) -> AsyncIterator[Payload]:
        number = 0
        for stream in job.inputs.values():
            async for payload in stream:
                if number < job.emitted:
                    yield OUT
                else:
                    along = {"partial": payload["partial"]} if "partial" in payload else {}
                    yield await self.submit(payload) | along
                number += 1

    def key(self, item: Item) -> Hashable:
        """What the family says."""
        return self._vae.encode_key(item) if isinstance(item, Request) else self._vae.key(item)

    def forward(self, items: Sequence[Item]) -> list[Payload | Exception]:
        """One pass."""
        import torch

        requests = [item for item in items if isinstance(item, Request)]
        with torch.inference_mode():
            if requests:
                return self._vae.encode(requests)
            return self._vae.decode([item for item in items if not isinstance(item, Request)])
