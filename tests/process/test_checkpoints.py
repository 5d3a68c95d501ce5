"""An engine's own state outlives its process, tensors and all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from adapters.chunk import Payload
from broker.client import Client, RequestStream
from tests.house import House, line, write
from tests.process.steps_engine import HANGS_AT, STEPS, advance, begin

ROOT = Path(__file__).parents[2]
SEED = 7


def steps(house: Callable[..., House], folder: Path, *options: str) -> House:
    """A house with the pipeline `line` of one stage that goes through steps."""
    document = line("a")
    document["stages"]["a"] = {"engine": "tests.process.steps_engine:StepsEngine"}
    home = house(env={"PYTHONPATH": str(ROOT)})
    home.start("--pipeline", write(folder, document), *options)
    return home


async def submit(client: Client, **params: Any) -> RequestStream:
    given = {"request": [{"text": "go"}]}
    return await client.submit("line", outputs=["text"], given=given, params={"a": params}, seed=SEED)


async def killed_at_a_step(home: House) -> list[Payload]:
    """All payloads of a request whose first engine is killed when it has done some of the steps."""
    given: list[Payload] = []
    async with home.client() as client, await submit(client, hangs=True) as stream:
        async for _, payload in stream:
            given.append({**payload, "latents": payload["latents"].copy()})
            if len(given) == HANGS_AT:
                (pid,) = home.pids("line", "a")
                os.kill(pid, signal.SIGKILL)
            del payload
    return given


async def test_the_next_attempt_goes_on_at_the_step_of_the_last_checkpoint(
    house: Callable[..., House], tmp_path: Path
) -> None:
    home = steps(house, tmp_path)
    given = await killed_at_a_step(home)
    state = begin(SEED)
    for step, payload in enumerate(given):
        state = advance(state)
        assert payload["step"] == step
        assert payload["codes"] == state["codes"]
        assert np.array_equal(payload["latents"], state["latents"])
    assert len(given) == STEPS
    # The last checkpoint may or may not have left the engine before it died.
    assert {payload["first"] for payload in given[:HANGS_AT]} == {0}
    assert {payload["first"] for payload in given[HANGS_AT:]} <= {HANGS_AT - 1, HANGS_AT}
    await asyncio.to_thread(home.until, lambda: home.status()["tables"]["blocks"] == 0)
