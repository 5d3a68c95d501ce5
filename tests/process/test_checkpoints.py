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
from scripts.leftovers import files_in
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


async def submit(
    client: Client, *, name: str | None = None, stored: bool = False, **params: Any
) -> RequestStream:
    given: dict[str, list[Payload]] = {"request": [{"text": "go"}]}
    return await client.submit(
        "line", outputs=["text"], given=given, params={"a": params}, seed=SEED, name=name, stored=stored
    )


async def killed_at_a_step(home: House) -> list[Payload]:
    """All payloads of a request whose first engine is killed when it has done some of the steps."""
    given: list[Payload] = []
    async with home.client() as client, await submit(client, hangs=True) as stream:
        async for _, payload in stream:
            given.append(kept(payload))
            if len(given) == HANGS_AT:
                (pid,) = home.pids("line", "a")
                os.kill(pid, signal.SIGKILL)
            del payload
    return given


def kept(payload: Payload) -> Payload:
    """A copy that needs no shared memory."""
    return {**payload, "latents": payload["latents"].copy()}


async def the_rest(home: House, name: str) -> list[Payload]:
    """What a caller gets that comes back for what is after the break; the stored request ends with it."""
    found = []
    async with home.client() as client, await client.attach(name, {"text": HANGS_AT}) as stream:
        async for _, payload in stream:
            found.append(kept(payload))
            del payload
        stream.abort()  # a stored answer is kept for others, unless it is told to go
    return found


def assert_undisturbed(given: list[Payload]) -> None:
    """All steps are there, as a life without a death would have given them, and few were computed twice."""
    state = begin(SEED)
    for step, payload in enumerate(given):
        state = advance(state)
        assert payload["step"] == step
        assert payload["codes"] == state["codes"]
        assert np.array_equal(payload["latents"], state["latents"])
    assert len(given) == STEPS
    assert {payload["first"] for payload in given[:HANGS_AT]} == {0}
    # The last checkpoint may or may not have left the engine before it died.
    assert {payload["first"] for payload in given[HANGS_AT:]} <= {HANGS_AT - 1, HANGS_AT}


async def test_the_next_attempt_goes_on_at_the_step_of_the_last_checkpoint(
    house: Callable[..., House], tmp_path: Path
) -> None:
    home = steps(house, tmp_path)
    assert_undisturbed(await killed_at_a_step(home))
    await asyncio.to_thread(home.until, lambda: home.status()["tables"]["blocks"] == 0)


def copies(home: House) -> list[str]:
    """The files of the request that is kept on disk."""
    return [file for file in files_in(home.state_dir) if "/on-disk-please/" in file]


async def test_a_state_on_disk_survives_the_machine_and_older_ones_make_room(
    house: Callable[..., House], tmp_path: Path
) -> None:
    home = steps(house, tmp_path, "--checkpoint", "disk")
    given: list[Payload] = []
    async with home.client() as client:
        stream = await submit(client, name="on-disk-please", stored=True, hangs=True)
        while len(given) < HANGS_AT:
            given.append(kept((await anext(stream))[1]))
        # Each payload has a copy on disk, and the last two states (one more is on its way out).
        await asyncio.to_thread(home.until, lambda: HANGS_AT + 2 <= len(copies(home)) <= HANGS_AT + 3)
        home.loses_power()
    home.start("--pipeline", str(tmp_path / "pipeline.yaml"), "--checkpoint", "disk")
    assert_undisturbed(given + await the_rest(home, "on-disk-please"))
    await asyncio.to_thread(home.until, lambda: not copies(home))
