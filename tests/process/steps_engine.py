"""An engine with a state: latents that go through steps, and the codes drawn from them. Loaded by workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from adapters.chunk import Payload
from tests.process.bare_engine import BareEngine
from workers.engine import Job

STEPS = 6
HANGS_AT = 4  #: the first attempt never gets past this step, if its parameter ``hangs`` says so
LATENTS = (4, 96, 96)  #: float32: far too much to ride inside a message


def begin(seed: int) -> Payload:
    """The state before the first step."""
    noise = np.random.default_rng(seed).standard_normal(LATENTS, np.float32)
    return {"step": 0, "latents": noise, "codes": []}


def advance(state: Payload) -> Payload:
    """One step."""
    latents = np.tanh(state["latents"] * np.float32(1.3) + np.float32(0.01))
    code = int(latents.sum() * 1000) % 4096
    return {"step": state["step"] + 1, "latents": latents, "codes": [*state["codes"], code]}


class StepsEngine(BareEngine):
    """A payload a step: {"step", "first" (of this attempt), "latents", "codes"}."""

    resumes = True

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """All steps that are left."""
        state: dict[str, Any] = job.resume_state or begin(job.seed)
        first = state["step"]
        for step in range(first, STEPS):
            await job.checkpoint(state)  # covers the steps before this one
            if step == HANGS_AT and job.attempt == 1 and job.params.get("hangs"):
                await asyncio.Event().wait()
            state = advance(state)
            if step >= job.emitted:
                yield {**state, "step": step, "first": first}
