"""Keys, where they are set: nobody without one comes in, and nobody sees what is another's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import openai as official
import pytest
from openai import AsyncOpenAI

from broker.client import Client
from tests.gateway.stack import Stack
from tests.gateway.test_bad_requests import CHAT, SPEECH

KEYS = "# who has which\nann sk-ann-1234567890\nbob sk-bob-1234567890\nann sk-ann-new\n"
ANN, BOB, ANN_TOO = ({"Authorization": f"Bearer {line.split()[1]}"} for line in KEYS.splitlines()[1:])


@pytest.fixture(scope="module")
def keyed(stack: Stack) -> Iterator[str]:
    """A gateway that wants keys: its URL."""
    file = stack.folder / "keys"
    file.touch(0o600)
    file.write_text(KEYS)
    url = stack.another_gateway("keyed", "--api-keys", str(file))
    yield url
    stack.end("keyed")
    file.unlink()


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-eve"}, {"Authorization": "Basic x"}])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/audio/speech"),
        ("POST", "/v1/audio/transcriptions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/requests/" + "0" * 24),
        ("GET", "/metrics"),
        ("GET", "/nowhere"),
    ],
)
async def test_without_a_key_nothing_is_told(
    keyed: str, method: str, path: str, headers: dict[str, str]
) -> None:
    async with (
        aiohttp.ClientSession(keyed) as session,
        session.request(method, path, headers=headers) as response,
    ):
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


async def test_probes_need_no_key(keyed: str) -> None:
    async with aiohttp.ClientSession(keyed) as session:
        for path in ("/health", "/ready"):
            status = 503
            async with asyncio.timeout(60):
                while status == 503:  # the broker may be slow to answer
                    async with session.get(path) as response:
                        status = response.status
            assert status == 200


async def test_the_official_client_with_and_without_its_key(keyed: str) -> None:
    async with AsyncOpenAI(base_url=f"{keyed}/v1", api_key="sk-bob-1234567890", max_retries=0) as client:
        assert "echo" in [model.id async for model in client.models.list()]
    async with AsyncOpenAI(base_url=f"{keyed}/v1", api_key="sk-eve", max_retries=0) as client:
        with pytest.raises(official.AuthenticationError):
            await client.models.list()


async def test_a_call_is_its_tenants_alone(keyed: str, broker: Client) -> None:
    """Another tenant, even one that knows the id, is told the same as of a call that never was."""
    async with aiohttp.ClientSession(keyed) as session:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/audio/speech", SPEECH)):
            async with session.post(path, json={**body, "store": True}, headers=ANN) as response:
                assert response.status == 200
                call = response.headers["x-request-id"]
                await response.read()
            for method, part in (("GET", ""), ("GET", "/stream"), ("GET", "/result"), ("DELETE", "")):
                async with session.request(method, f"/v1/requests/{call}{part}", headers=BOB) as response:
                    assert response.status == 404
                    assert (await response.json())["error"]["code"] == "request_not_found"
            async with session.get(f"/v1/requests/{call}", headers=ANN_TOO) as response:
                assert (await response.json())["status"] == "done", "by whichever of the tenant's keys"
            async with session.delete(f"/v1/requests/{call}", headers=ANN) as response:
                assert response.status == 200
