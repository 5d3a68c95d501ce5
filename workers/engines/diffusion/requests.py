"""What stages next to the caller read."""

from __future__ import annotations

from adapters.chunk import Payload
from workers.engine import ItemError, Job
from workers.engines.diffusion.family import Request, Wishes
from workers.params import checked


async def request_of(job: Job, wishes: type[Wishes]) -> Request:
    """A job's request. Raises ItemError (400) for one without a prompt, or with parameters out of bounds."""
    payload: Payload = {}
    for producer in job.inputs:
        for part in await job.gather(producer):
            payload |= part
    for name in ("prompt", "negative_prompt"):
        if not isinstance(payload.get(name, ""), str):
            raise ItemError(f"{name}: expected a string", status=400, param=name)
    if "prompt" not in payload:
        raise ItemError("prompt: is missing", status=400, param="prompt")
    return Request(payload, checked(job.params, wishes), job.seed)
