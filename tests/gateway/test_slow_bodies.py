"""Callers that send slowly are waited for; those that send nothing, or nothing any more, hold no place."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from tests.gateway.stack import Stack
from tests.gateway.test_bad_requests import CHAT, works

STALL_S = 2.0  #: `--stall-s` of the stack
FORM = b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na'

STALLED = {
    "/v1/chat/completions": ("application/json", b'{"model":'),
    "/v1/audio/speech": ("application/json", b""),
    "/v1/images/generations": ("application/json", b"{"),
    "/v1/images/edits": ("multipart/form-data; boundary=b", FORM),
    "/v1/audio/transcriptions": ("multipart/form-data; boundary=b", b"--b"),
    "/v1/videos": ("multipart/form-data; boundary=b", FORM),
}


@pytest.mark.parametrize("path", STALLED)
async def test_a_body_that_stops_coming_is_a_408(
    stack: Stack, http: aiohttp.ClientSession, path: str
) -> None:
    kind, begin = STALLED[path]
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: 1000\r\n\r\n"
    began = asyncio.get_running_loop().time()
    try:
        writer.write(head.encode() + begin)
        async with asyncio.timeout(STALL_S + 30):
            status = await reader.readline()
            answer = await reader.readuntil(b"}}")
        assert asyncio.get_running_loop().time() - began >= STALL_S - 0.1
    finally:
        writer.close()
    assert b" 408 " in status
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "body_stalled"
    assert "2 s" in error["message"]
    await works(http)


async def test_a_body_that_comes_slowly_is_taken(stack: Stack) -> None:
    """It takes longer than the gateway bears with silence; each of its pieces takes far less."""
    body = json.dumps(CHAT).encode()
    pieces = [body[i : i + 4] for i in range(0, len(body), 4)]
    patience_s = 4.0

    async def slowly() -> object:
        for piece in pieces:
            await asyncio.sleep(1.1 * patience_s / len(pieces))  # it is the pause that is tried
            yield piece

    url = stack.another_gateway("patient", "--stall-s", str(patience_s))
    async with (
        aiohttp.ClientSession(url) as http,
        http.post("/v1/chat/completions", data=slowly()) as response,
    ):
        assert response.status == 200, await response.text()
    stack.end("patient")


@pytest.mark.parametrize("begin", [b"", b"G", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"])
async def test_a_connection_without_a_request_is_closed(stack: Stack, begin: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    began = asyncio.get_running_loop().time()
    try:
        writer.write(begin)
        async with asyncio.timeout(STALL_S + 30):
            assert await reader.read() == b""
        assert asyncio.get_running_loop().time() - began >= STALL_S - 0.1
    finally:
        writer.close()


async def test_a_connection_that_has_asked_is_kept_for_the_next_request(stack: Stack) -> None:
    quick_reader, quick = await asyncio.open_connection("127.0.0.1", stack.port)
    mute_reader, mute = await asyncio.open_connection("127.0.0.1", stack.port)
    try:
        for _ in range(2):
            quick.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(30):
                assert b"200" in await quick_reader.readline()
                await quick_reader.readuntil(b"}")
                assert await mute_reader.read() == b"", "it came later, and has not asked"
    finally:
        quick.close()
        mute.close()
