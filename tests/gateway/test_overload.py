"""More than there is room for: refused at once with a hint when to come back; what was accepted finishes."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import openai as official
import pytest
from openai import AsyncOpenAI

from broker.client import Client
from tests.gateway.test_bad_requests import USER

ROOM = 4  #: max_requests of the pipeline `narrow`
SLOW = {"model": "narrow", "messages": [USER], "sampling_params_list": [{"sleep_s": 0.3}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_rest_is_told_to_come_back(
    http: aiohttp.ClientSession, broker: Client, stream: bool
) -> None:
    async def ask() -> tuple[int, str | None, Any]:
        async with http.post("/v1/chat/completions", json={**SLOW, "stream": stream}) as response:
            return response.status, response.headers.get("Retry-After"), await response.text()

    answers = await asyncio.gather(*(ask() for _ in range(12)))
    assert sorted(status for status, _, _ in answers) == [200] * ROOM + [429] * (12 - ROOM)
    for status, retry_after, text in answers:
        if status == 429:
            assert retry_after is not None
            assert int(retry_after) >= 1
            assert '"type":"rate_limit_error"' in text
        else:
            assert "hello" in text


async def test_every_choice_takes_a_place(http: aiohttp.ClientSession, broker: Client) -> None:
    async with http.post("/v1/chat/completions", json={**SLOW, "n": ROOM + 1}) as response:
        assert response.status == 429
    async with http.post("/v1/chat/completions", json={**SLOW, "n": ROOM}) as response:
        assert response.status == 200


async def test_the_official_client_knows_the_error(openai: AsyncOpenAI) -> None:
    with pytest.raises(official.RateLimitError):
        await openai.chat.completions.create(
            model="narrow",
            messages=[{"role": "user", "content": "x"}],
            n=ROOM + 1,
            extra_body={"sampling_params_list": [{"sleep_s": 0.3}]},
        )
