"""A picture pipeline as a user starts it, whose denoiser is killed half-way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from adapters.chunk import Payload
from pipelines.loader import load
from tests.families.diffusion_rig import Asked
from tests.families.heard import START_S, Houses

ROOT = Path(__file__).parents[2]  #: where workers find what is held


async def with_a_kill(
    house: Houses,
    pipeline: str,
    model: Path,
    asked: Asked,
    *settings: str,
    output: str = "image",
    has: Iterable[str] = (),
    victim: Callable[[int], int] = lambda engine: engine,
) -> list[Payload]:
    """What comes out of real processes, one of which dies after the first picture on the way.

    The denoiser waits for that in its second half.

    Args:
        house: The fixture.
        pipeline: Its name.
        model: The folder of all its stages.
        asked: With ``partial_images``.
        settings: Those of ``--stage``.
        output: "image" or "frames".
        has: "image" for requests with pictures.
        victim: The denoiser's process number -> whose to kill.

    The denoiser must have had two attempts, all other stages one.
    """
    request, params, seed = asked
    family = load(pipeline).stages["denoiser"].options["family"]
    home = house()
    held = home.folder / "held"
    held.touch()
    home.env |= {"PYTHONPATH": str(ROOT), "HELD_FAMILY": family, "HELD_WHILE": str(held)}
    settings = (*settings, "denoiser.family=tests.families.held:Held")
    options = [option for setting in settings for option in ("--stage", setting)]
    home.start("--pipeline", pipeline, "--model", str(model), *options, ready=False)
    await asyncio.to_thread(home.until, home.is_ready, START_S)
    made: list[Payload] = []
    async with home.client() as client:
        stages = client.pipelines[pipeline].stages
        async with await client.submit(
            pipeline,
            outputs=[output],
            given={"request": [request]},
            params=dict.fromkeys(stages, params),
            seed=seed,
            has=list(has),
        ) as stream:
            async for _, payload in stream:
                made.append({name: _copied(value) for name, value in payload.items()})
                if len(made) == 1:
                    (pid,) = await asyncio.to_thread(home.pids, pipeline, "denoiser")
                    os.kill(victim(pid), signal.SIGKILL)
                    held.unlink()
    attempts = {timing.stage: timing.attempts for timing in stream.timings}
    assert attempts == {name: 2 if name == "denoiser" else 1 for name in attempts}
    assert [payload.get("partial") for payload in made] == [*range(params["partial_images"]), None]
    return made


def _copied(value: Any) -> Any:
    return np.array(value) if isinstance(value, np.ndarray) else value
