"""Callers of `omni-broker start` whose gateway or broker is killed, or whose pipeline has no room."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from broker.gateway.link import PATIENCE_S
from tests.house import House, line, write

Houses = Callable[..., House]

WORDS = "one two three four five six seven eight"
CHAT: dict[str, Any] = {
    "model": "echo",
    "messages": [{"role": "user", "content": WORDS}],
    "seed": 11,
}
STREAM = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
SLOW_STREAM = {**STREAM, "sampling_params_list": [{"chunk_sleep_s": 0.15}, None, None, None]}
#: It stops after four words until its engine is replaced: whatever is killed meanwhile dies in the middle.
BROKEN_STREAM = {**STREAM, "sampling_params_list": [{"hang": True, "at": 4, "attempts": 1}, None, None, None]}
WANTS_IDS = {"Accept": "text/event-stream"}
TIMEOUT = aiohttp.ClientTimeout(total=120)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str]]:
    """(id, data) of the events as they come."""
    rest = ""
    async for piece in response.content.iter_any():
        *blocks, rest = (rest + piece.decode()).split("\n\n")
        for block in blocks:
            head, _, data = block.rpartition("data: ")
            yield head.strip().removeprefix("id: "), data


def same(data: str) -> str:
    """An event without what differs from one call to the next."""
    if data == "[DONE]":
        return data
    chunk = json.loads(data)
    del chunk["id"], chunk["created"]
    for choice in chunk["choices"]:
        for name in ("id", "expires_at"):
            choice["delta"].get("audio", {}).pop(name, None)
    return json.dumps(chunk)


async def undisturbed(session: aiohttp.ClientSession) -> list[str]:
    async with session.post("/v1/chat/completions", json=STREAM) as response:
        assert response.status == 200, await response.text()
        return [same(data) async for _, data in events(response)]


async def test_the_rest_of_a_stream_whose_gateway_was_killed(echo: House) -> None:
    async with aiohttp.ClientSession(echo.base_url, timeout=TIMEOUT) as session:
        expected = await undisturbed(session)
        async with session.post("/v1/chat/completions", json=BROKEN_STREAM, headers=WANTS_IDS) as response:
            call = response.headers["x-request-id"]
            stream = events(response)
            got = [await anext(stream) for _ in range(3)]
            os.kill(echo.process_of("broker.gateway"), signal.SIGKILL)
            with pytest.raises(aiohttp.ClientPayloadError):
                got += [event async for event in stream]
        await asyncio.to_thread(echo.until, echo.is_ready)
        (engine,) = echo.pids("echo", "say")
        os.kill(engine, signal.SIGKILL)
        headers = {"Last-Event-ID": got[-1][0]}
        async with session.get(f"/v1/requests/{call}/stream", headers=headers) as response:
            assert response.status == 200, await response.text()
            got += [event async for event in events(response)]
        assert [same(data) for _, data in got] == expected
        assert [number for number, _ in got] == [str(number) for number in range(1, len(got) + 1)]
        async with session.get(f"/v1/requests/{call}") as response:
            assert response.status == 404, "what was delivered is forgotten"


async def test_a_stream_goes_on_while_its_broker_is_killed(echo: House) -> None:
    async with aiohttp.ClientSession(echo.base_url, timeout=TIMEOUT) as session:
        expected = await undisturbed(session)
        async with session.post("/v1/chat/completions", json=SLOW_STREAM, headers=WANTS_IDS) as response:
            got = []
            async for _, data in events(response):
                got.append(same(data))
                if len(got) == 3:
                    os.kill(echo.process_of("broker.server"), signal.SIGKILL)
        assert got == expected


async def test_speech_goes_on_byte_by_byte_while_its_broker_is_killed(echo: House) -> None:
    speech = {"input": WORDS, "voice": "alloy", "response_format": "mp3", "seed": 11}
    slow = {**speech, "sampling_params_list": [None, {"chunk_sleep_s": 0.15}, None, None]}
    async with aiohttp.ClientSession(echo.base_url, timeout=TIMEOUT) as session:
        async with session.post("/v1/audio/speech", json=speech) as response:
            expected = await response.read()
        async with session.post("/v1/audio/speech", json=slow) as response:
            got = await response.content.readany()
            os.kill(echo.process_of("broker.server"), signal.SIGKILL)
            got += await response.read()
    assert got == expected


async def test_the_rest_of_a_stream_after_everything_was_killed(house: Houses) -> None:
    """As when the machine goes down: nothing of it runs any more, and what is on disk is started again."""
    home = house("--pipeline", "echo", "--checkpoint", "disk")
    body = {**BROKEN_STREAM, "modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}
    async with aiohttp.ClientSession(home.base_url, timeout=TIMEOUT) as session:
        async with session.post(
            "/v1/chat/completions", json={**body, "sampling_params_list": None}
        ) as response:
            expected = sorted([same(data) async for _, data in events(response)])
        async with session.post("/v1/chat/completions", json=body, headers=WANTS_IDS) as response:
            call = response.headers["x-request-id"]
            stream = events(response)
            got = [await anext(stream) for _ in range(6)]
            home.loses_power()
            with pytest.raises(aiohttp.ClientPayloadError):
                got += [event async for event in stream]
    home.start("--pipeline", "echo", "--checkpoint", "disk")
    async with (
        aiohttp.ClientSession(home.base_url, timeout=TIMEOUT) as session,
        session.get(f"/v1/requests/{call}/stream", params={"after": got[-1][0]}) as response,
    ):
        assert response.status == 200, await response.text()
        got += [event async for event in events(response)]
    assert got[-1][1] == "[DONE]"
    assert sorted(same(data) for _, data in got) == expected


async def test_a_call_that_comes_while_the_broker_is_restarted_is_answered(echo: House) -> None:
    async with aiohttp.ClientSession(echo.base_url, timeout=TIMEOUT) as session:
        os.kill(echo.process_of("broker.server"), signal.SIGKILL)
        while True:
            began = time.monotonic()
            async with session.post("/v1/chat/completions", json=CHAT) as response:
                waited = time.monotonic() - began
                if response.status != 503 or waited < PATIENCE_S:  # else it was the restart that took long
                    assert response.status == 200, await response.text()
                    break


async def test_where_no_pipeline_has_room_the_body_is_not_waited_for(house: Houses, tmp_path: Path) -> None:
    document = line("a")
    document["limits"] = {"max_requests": 1}
    home = house("--pipeline", write(tmp_path, document))
    body = {"messages": [{"role": "user", "content": "x"}], "sampling_params_list": [{"hang": True}]}
    async with aiohttp.ClientSession(home.base_url, timeout=TIMEOUT) as session:
        first = asyncio.create_task(session.post("/v1/chat/completions", json=body))
        await asyncio.to_thread(home.until, lambda: home.stage("line", "a")["running"])
        assert await status_of(session, body) == 429  # if not before, the gateway knows it from now on
        head = await asyncio.to_thread(answer_to_a_head, home.port)
        assert head.startswith("HTTP/1.1 429 ")
        assert "\r\nRetry-After: " in head
        first.cancel()
        await asyncio.to_thread(home.until, lambda: not home.stage("line", "a")["running"])
        del body["sampling_params_list"]
        async with asyncio.timeout(60):
            while (status := await status_of(session, body)) == 429:  # it has yet to hear that there is room
                await asyncio.sleep(0.01)
        assert status == 200


async def status_of(session: aiohttp.ClientSession, body: dict[str, Any]) -> int:
    async with session.post("/v1/chat/completions", json=body) as response:
        return response.status


def answer_to_a_head(port: int) -> str:
    """What comes for the head of a request with a large body that is never sent."""
    head = b""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n"
        )
        while b"\r\n\r\n" not in head and (piece := connection.recv(65536)):
            head += piece
    return head.decode()
