"""Engine ``omni-encoder``: the audio and vision towers of an omni model, as a stage of their own.

Which model's, says the option ``family``. Media of one kind that wait at the same time share a pass, whoever
sent them; they are packed one after the other, not padded, so a long one costs a short one nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Sequence

from adapters.chunk import Payload
from pipelines.graph import Stage
from pipelines.options import OmniEncoderOptions, options_of
from workers.batching import BatchingEngine
from workers.engine import OUT, Job
from workers.families.find import find_class
from workers.families.libraries import load_libraries
from workers.families.media import Encoder, Medium, media_of


class OmniEncoderEngine(BatchingEngine[Medium, Payload]):
    """Requests in; for each clip, picture and film in them {"kind", "index", "embeds", ...} out."""

    _encoder: Encoder

    def __init__(self, stage: Stage, *, device: str) -> None:
        super().__init__(stage, device=device)
        self.options = options_of(stage, OmniEncoderOptions)

    def load(self) -> None:
        """Loads the towers. Raises MissingLibrary, or ValueError for what is no family or checkpoint."""
        load_libraries(self.stage)
        family = find_class(self.options.family)
        self._encoder = family(self.stage.model or "", self.options, self.device)

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """Encodes a request's media one after the other, so that requests take turns."""
        out = 0
        for producer in job.inputs:
            for request in await job.gather(producer):
                for index, medium in media_of(request):
                    if out < job.emitted:
                        yield OUT
                    else:
                        yield {"kind": medium.kind, "index": index, **await self.submit(medium)}
                    out += 1

    def key(self, item: Medium) -> Hashable:
        """Each kind has a tower of its own, or at least a form of its own."""
        return item.kind

    def forward(self, items: Sequence[Medium]) -> Sequence[Payload | Exception]:
        """One pass of the tower."""
        return self._encoder.encode(items[0].kind, items)
