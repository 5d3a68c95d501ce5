"""More than there is room for: refused at once with a hint when to come back; what was accepted finishes."""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from typing import Any

import aiohttp
import openai as official
import pytest
from openai import AsyncOpenAI

from broker.client import Client
from tests.gateway.stack import Stack, reaches, standing_still
from tests.gateway.test_bad_requests import CHAT, USER, works
from tests.gateway.test_disconnects import HANG

ROOM = 4  #: max_requests of the pipeline `narrow`
ASK = {"model": "narrow", "messages": [USER]}
SLOW = {**ASK, "sampling_params_list": [{"sleep_s": 0.3}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_rest_is_told_to_come_back(
    http: aiohttp.ClientSession, broker: Client, stream: bool
) -> None:
    async def ask() -> tuple[int, str | None, Any]:
        async with http.post("/v1/chat/completions", json={**ASK, "stream": stream}) as response:
            return response.status, response.headers.get("Retry-After"), await response.text()

    async with standing_still(broker, "narrow", "say"):  # or an early one makes room for a late one
        asked = [asyncio.create_task(ask()) for _ in range(12)]
        async with asyncio.timeout(60):
            while sum(task.done() for task in asked) < 12 - ROOM:
                await asyncio.wait([task for task in asked if not task.done()], return_when=FIRST_COMPLETED)
        await reaches(broker, 60.0, requests=ROOM)
    answers = await asyncio.gather(*asked)
    assert sorted(status for status, _, _ in answers) == [200] * ROOM + [429] * (12 - ROOM)
    for status, retry_after, text in answers:
        if status == 429:
            assert retry_after is not None
            assert int(retry_after) >= 1
            assert '"type":"rate_limit_error"' in text
        else:
            assert "hello" in text


async def test_every_choice_takes_a_place(http: aiohttp.ClientSession, broker: Client) -> None:
    async def ask(choices: int) -> int:
        async with http.post("/v1/chat/completions", json={**SLOW, "n": choices}) as response:
            return response.status

    assert await ask(ROOM + 1) == 429
    async with asyncio.timeout(60):  # the gateway hears a moment later that there is room again
        while (status := await ask(ROOM)) == 429:
            await asyncio.sleep(0.01)
    assert status == 200


async def test_the_official_client_knows_the_error(openai: AsyncOpenAI) -> None:
    with pytest.raises(official.RateLimitError):
        await openai.chat.completions.create(
            model="narrow",
            messages=[{"role": "user", "content": "x"}],
            n=ROOM + 1,
            extra_body={"sampling_params_list": [{"sleep_s": 0.3}]},
        )


async def test_a_gateway_handles_so_many_requests_at_once(stack: Stack, broker: Client) -> None:
    url = stack.another_gateway("small", "--max-open", "2")
    try:
        async with aiohttp.ClientSession(url) as session:
            hanging = {**CHAT, "sampling_params_list": [HANG, None, None]}
            tasks = [
                asyncio.create_task(session.post("/v1/chat/completions", json=hanging)) for _ in range(2)
            ]
            await reaches(broker, 60.0, running=2)
            async with session.post("/v1/chat/completions", json=CHAT) as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) >= 1
                assert (await response.json())["error"]["code"] == "overloaded"
            for path in ("/health", "/ready"):
                async with session.get(path) as response:
                    said = await response.text()
                    assert response.status == 200 or "broker does not answer" in said, "probes are answered"
            for task in tasks:
                task.cancel()
            await reaches(broker, 60.0, running=0)
            status = 503
            async with asyncio.timeout(60):
                while status == 503:  # the gateway counts them for a moment longer than the broker
                    async with session.post("/v1/chat/completions", json=CHAT) as response:
                        status = response.status
            assert status == 200
    finally:
        stack.end("small")


async def test_a_deadline_that_passes_ends_the_request(http: aiohttp.ClientSession, broker: Client) -> None:
    body = {**CHAT, "timeout_s": 0.3, "sampling_params_list": [HANG, None, None]}
    async with asyncio.timeout(60):
        while True:
            async with http.post("/v1/chat/completions", json=body) as response:
                status, error = response.status, (await response.json())["error"]
            if status != 503:
                break
            await works(
                http
            )  # slow requests of other tests have taught the broker to refuse it; quick ones undo it
    assert (status, error["code"]) == (504, "timeout")


async def test_a_deadline_that_can_not_be_met_is_refused_at_once(
    http: aiohttp.ClientSession, broker: Client
) -> None:
    for _ in range(3):  # from these the broker learns how long it takes
        async with http.post("/v1/chat/completions", json=SLOW) as response:
            assert response.status == 200
    async with http.post("/v1/chat/completions", json={**SLOW, "timeout_s": 0.001}) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["code"] == "overloaded"
