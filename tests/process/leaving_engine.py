"""An engine that dies and leaves a child behind, which holds its log open. Loaded by workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from adapters.chunk import Payload
from tests.process.bare_engine import BareEngine
from workers.engine import Job


class LeavingEngine(BareEngine):
    """Its first attempt at a job is its end; the next one answers."""

    resumes = False

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """One payload."""
        if job.attempt == 1:
            await asyncio.create_subprocess_exec("sleep", "600")
            os._exit(9)
        yield {"text": "done"}
