"""The pipeline as a user starts it: real processes, of which the denoiser's is killed half-way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families.diffusion_rig import Painted, Reference, assert_same, reference
from tests.families.heard import START_S
from tests.house import House

REQUEST = {"prompt": "a cat", "negative_prompt": "a dog"}
#: Many steps, so that the death comes long before the last one.
PARAMS = {"width": 64, "height": 32, "num_frames": 9, "num_inference_steps": 120}


@pytest.fixture(scope="session")
def theirs(made: Callable[[Any], Path]) -> Reference:
    """diffusers' film."""
    from diffusers import WanPipeline

    return reference(WanPipeline.from_pretrained(made("t2v")), seed=7, **REQUEST, **PARAMS)


async def test_a_film_whose_denoiser_is_killed_is_that_of_diffusers(
    house: Callable[..., House], made: Callable[[Any], Path], theirs: Reference
) -> None:
    home = house()
    # Nobody brings a picture, so nobody waits for those who would look at it.
    options = ("--model", str(made("t2v")), "--stage", "picture.replicas=0")
    home.start("--pipeline", "wan2_2", *options, ready=False)
    await asyncio.to_thread(home.until, home.is_ready, START_S)
    params = {**PARAMS, "partial_images": 3}
    films = []
    async with (
        home.client() as client,
        await client.submit(
            "wan2_2",
            outputs=["video"],
            given={"request": [REQUEST]},
            params=dict.fromkeys(("text", "denoiser", "vae"), params),
            seed=7,
        ) as stream,
    ):
        async for _, payload in stream:
            films.append({name: np.array(value) for name, value in payload.items()})
            if len(films) == 1:  # as far as a quarter of the way has brought it
                (pid,) = await asyncio.to_thread(home.pids, "wan2_2", "denoiser")
                os.kill(pid, signal.SIGKILL)
    assert {timing.stage: timing.attempts for timing in stream.timings}["denoiser"] == 2
    assert [int(film.get("partial", -1)) for film in films] == [0, 1, 2, -1]
    ours = Painted({"denoiser": [{"latents": theirs.latents}], "vae": [films[-1]]})
    assert_same(ours, theirs)  # the frames; latents stay between the stages
