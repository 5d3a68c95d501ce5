"""Requests that share nothing but their time, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from adapters.chunk import Payload
from tests.families.diffusion_rig import Array, Rig, at_once, running

STAGES = ("text", "denoiser")

#: (request, parameters, seed)
REQUESTS: list[tuple[Payload, dict[str, Any], int]] = [
    ({"prompt": "a red ring"}, {"num_inference_steps": 6, "guidance_scale": 4.0}, 1),
    ({"prompt": "blue", "negative_prompt": "green"}, {"num_inference_steps": 4, "guidance_scale": 3.0}, 3),
    ({"prompt": "no guide"}, {"num_inference_steps": 5, "guidance_scale": 1.0}, 4),
]


async def texts(rig: Rig, request: Payload, params: dict[str, Any], seed: int) -> dict[str, list[Payload]]:
    """What the denoiser gets of a request."""
    made: dict[str, list[Payload]] = {"request": [request]}
    made["text"] = await rig.stage("text", made, seed, params)
    return made


async def latents(rig: Rig, request: Payload, params: dict[str, Any], seed: int) -> Array:
    """The last ones of a request."""
    made = await texts(rig, request, params, seed)
    return np.asarray((await rig.stage("denoiser", made, seed, params))[-1]["latents"])


async def together(rig: Rig) -> list[Array]:
    """The last latents of all requests, computed at once."""
    return await at_once(*(latents(rig, *request) for request in REQUESTS))


async def alone(rig: Rig) -> list[Array]:
    """The same, one request after the other."""
    return [await latents(rig, *request) for request in REQUESTS]


def with_settings(checkpoint: Path, *settings: str) -> Any:
    """A started rig of text encoder and denoiser."""
    return running("sd3", checkpoint, *(f"denoiser.{setting}" for setting in settings), stages=STAGES)


def assert_equal(some: list[Array], others: list[Array], tolerance: float = 1e-5) -> None:
    """Each differs by less than the tolerance."""
    for one, other in zip(some, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)
