"""An engine whose passes refuse everything. Loaded by workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from adapters.chunk import Payload
from workers.batching import BatchingEngine
from workers.engine import ItemError, Job


class RefusingEngine(BatchingEngine[Payload, Payload]):
    """Payloads in, errors out."""

    def load(self) -> None:
        """Nothing to load."""

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """One job."""
        for stream in job.inputs.values():
            async for payload in stream:
                yield await self.submit(payload)

    def key(self, item: Payload) -> str:
        """All go together."""
        return ""

    def forward(self, items: Sequence[Payload]) -> list[Payload | Exception]:
        """One pass."""
        return [ItemError("no", status=400) for _ in items]
