"""Processes that are told to leave while others still need what they have made."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from adapters.chunk import INLINE_LIMIT
from adapters.locks import is_locked
from broker.gateway.audio import wav_header
from scripts.leftovers import files_in
from tests.house import House, write
from tests.leftovers import until

Houses = Callable[..., House]

TIMEOUT = aiohttp.ClientTimeout(total=120)
DIGEST = {
    "name": "digest",
    "outputs": {"text": "sum"},
    "stages": {"sum": {"engine": "function", "options": {"op": "sum"}, "when": "audio"}},
    "edges": [{"from": "request", "to": "sum"}],
    "endpoints": {"chat": {"input": "request", "outputs": ["text"]}},
}


def question(**faults: Any) -> dict[str, Any]:
    """A stored call with a second of sound, which is too large to ride in a message."""
    samples = (10_000 * np.sin(np.arange(16_000) / 7)).astype("<i2").tobytes()
    assert len(samples) > INLINE_LIMIT
    wav = base64.b64encode(wav_header(16_000, len(samples)) + samples).decode()
    content = [{"type": "input_audio", "input_audio": {"data": wav, "format": "wav"}}]
    return {
        "messages": [{"role": "user", "content": content}],
        "seed": 1,
        "store": True,
        "sampling_params_list": [faults],
    }


async def ask_and_leave(home: House, session: aiohttp.ClientSession, body: dict[str, Any]) -> str:
    """Sends a call whose caller goes away before the answer; returns its id."""
    body = {**body, "stream": True}
    async with session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return response.headers["x-request-id"]


async def text_of(response: aiohttp.ClientResponse) -> str:
    """What an answer in one piece says."""
    assert response.status == 200, await response.text()
    text: str = (await response.json())["choices"][0]["message"]["content"]
    return text


async def forget(session: aiohttp.ClientSession, call: str) -> None:
    """A stored call's answer is not needed any more."""
    async with session.delete(f"/v1/requests/{call}") as response:
        assert response.status == 200


def segments(home: House) -> list[str]:
    """What lies in the house's shared memory, without the broker's own marks."""
    return [name for name in files_in(home.shm_dir) if name[-1].isdigit()]


async def test_an_upload_outlives_the_gateway_that_took_it(house: Houses, tmp_path: Path) -> None:
    home = house("--pipeline", write(tmp_path, DIGEST))
    async with aiohttp.ClientSession(home.base_url, timeout=TIMEOUT) as session:
        async with session.post("/v1/chat/completions", json=question()) as response:
            expected = await text_of(response)
            await forget(session, response.headers["x-request-id"])
        call = await ask_and_leave(home, session, question(hang=True, attempts=1))
        until(lambda: home.stage("digest", "sum")["running"] == 1, "the stage to have the call")
        gateway = home.process_of("broker.gateway")
        os.kill(gateway, signal.SIGTERM)
        until(lambda: gateway not in home.processes(), "the gateway to leave")
        (worker,) = home.pids("digest", "sum")
        os.kill(worker, signal.SIGKILL)
        home.until(lambda: home.get("/ready")[0] == 200)
        async with session.get(f"/v1/requests/{call}/result") as response:
            assert await text_of(response) == expected
        assert home.stage("digest", "sum")["tasks"]["deaths"] == 1
        await forget(session, call)
    until(lambda: segments(home) == [], "the upload to go with its call")


async def test_an_upload_outlives_a_clean_stop(house: Houses, tmp_path: Path) -> None:
    """No worker is there for it: the call waits in the journal, and in shared memory, for the next start."""
    pipeline = write(tmp_path, DIGEST)
    home = house("--pipeline", pipeline, "--no-workers", ready=False)
    home.until(lambda: b"digest/sum" in home.get("/ready")[1])  # so its gateway knows the broker
    async with aiohttp.ClientSession(home.base_url, timeout=TIMEOUT) as session:
        call = await ask_and_leave(home, session, question())
    assert home.process is not None
    assert home.command("stop").returncode == 0
    assert home.process.wait(60) == 0
    home.start("--pipeline", pipeline)
    async with aiohttp.ClientSession(home.base_url, timeout=TIMEOUT) as session:
        async with session.get(f"/v1/requests/{call}/result") as response:
            assert len(await text_of(response)) == 8
        await forget(session, call)
    until(lambda: segments(home) == [], "the upload to go with its call")


async def test_a_client_that_leaves_last_removes_what_nobody_comes_back_for(
    house: Houses, tmp_path: Path
) -> None:
    options = ("--pipeline", write(tmp_path, DIGEST), "--no-gateway", "--no-workers", "--no-journal")
    home = house(*options, ready=False)
    home.until((home.run_dir / "clients.sock").exists)
    given = {"request": [{"sound": np.zeros(INLINE_LIMIT, np.float32)}]}
    async with home.client() as client:
        await client.submit("digest", outputs=["text"], given=given, has=["audio"])
        home.kill()
        (mark,) = home.shm_dir.glob("omni-*-run")
        until(lambda: not is_locked(mark), "the broker to end")
        assert segments(home)
    assert segments(home) == []
    home.start(*options, ready=False)
    assert home.status()["tables"]["requests"] == 0  # it is up, so it can end as it should
