"""An engine that waits for a file. Loaded by workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from adapters.chunk import Payload
from tests.process.bare_engine import BareEngine
from workers.engine import Job

PIECES = 3
LOOK_S = 0.01


class GatedEngine(BareEngine):
    """Three payloads, once the file that the parameter ``gate`` names is there."""

    resumes = True

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """What is not out yet."""
        while not is_open(job.params["gate"]):
            await asyncio.sleep(LOOK_S)
        for number in range(job.emitted, PIECES):
            yield {"text": str(number)}


def is_open(gate: str) -> bool:
    """Whether the file is there."""
    return Path(gate).exists()
