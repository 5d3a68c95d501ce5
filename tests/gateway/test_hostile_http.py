"""What is no decent HTTP request costs its sender an error and the gateway nothing."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from tests.gateway.stack import Stack, until
from tests.gateway.test_bad_requests import CHAT, works

BODIES = {
    "nothing": b"",
    "no json": b"hello",
    "a list": b"[]",
    "cut": b'{"model":"echo","messages":[{"role":"user"',
    "no utf-8": b'{"model":"echo","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "lone surrogate": b'{"model":"echo","messages":[{"role":"user","content":"\\ud800"}]}',
    "NaN": b'{"model":"echo","temperature":NaN,"messages":[{"role":"user","content":"x"}]}',
    "huge number": b'{"model":"echo","temperature":1e999,"messages":[{"role":"user","content":"x"}]}',
    "deep in an unknown field": b'{"messages":[],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep in a known field": b'{"messages":[],"tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "random": bytes(range(256)) * 16,
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech"])
async def test_a_body_that_is_no_request_is_a_400(http: aiohttp.ClientSession, path: str, name: str) -> None:
    async with http.post(path, data=BODIES[name]) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    await works(http)


async def test_a_body_over_the_limit_is_a_413(http: aiohttp.ClientSession) -> None:
    body = json.dumps({**CHAT, "padding": "x" * (3 << 20)})
    async with http.post("/v1/chat/completions", data=body) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "too_large"
    await works(http)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405), ("GET", "/v1/models/none", 404)],
)
async def test_unknown_places_have_json_errors(
    http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    async with http.request(method, path) as response:
        assert response.status == status
        assert (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        ("POST", "/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/audio/transcription", "did you mean /v1/audio/transcriptions?"),
        ("GET", "/", "/v1/models lists"),
        ("GET", "/v1/images/edits", "takes POST, not GET"),
        ("PUT", "/v1/videos", "takes GET, HEAD, POST, not PUT"),
    ],
)
async def test_a_wrong_place_names_the_right_one(
    http: aiohttp.ClientSession, method: str, path: str, says: str
) -> None:
    async with http.request(method, path) as response:
        assert says in (await response.json())["error"]["message"]
        assert response.status != 405 or response.headers["Allow"] in says


async def test_a_form_where_json_is_wanted_is_named(http: aiohttp.ClientSession) -> None:
    form = aiohttp.FormData({"model": "echo"})
    async with http.post("/v1/chat/completions", data=form) as response:
        assert response.status == 400
        message = (await response.json())["error"]["message"]
    assert "application/x-www-form-urlencoded: send it as application/json" in message


async def raw(stack: Stack, data: bytes) -> bytes:
    """Sends bytes and reads until the gateway closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    try:
        writer.write(data)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_bytes_that_are_no_http(stack: Stack, http: aiohttp.ClientSession) -> None:
    for data in (
        b"\0" * 100 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ):
        answer = await raw(stack, data)
        assert answer == b"" or b" 400 " in answer.split(b"\r\n")[0]
    await works(http)


async def test_bytes_that_are_no_http_are_one_line_in_the_log_without_them(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    log = stack.folder / "gateway.log"
    before = len(log.read_text())
    await raw(stack, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization\0: Bearer sk-secret\r\n\r\n")
    until(lambda: log.read_text().endswith("\n", before), "a line in the log")
    assert log.read_text()[before:] == "what 127.0.0.1 sent is no HTTP request\n"


async def test_a_header_of_a_megabyte_is_refused(stack: Stack, http: aiohttp.ClientSession) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + b"i" * (1 << 20)
    answer = await raw(stack, head + b"\r\n\r\n")
    assert answer == b"" or b" 400 " in answer.split(b"\r\n")[0]
    await works(http)


async def test_what_a_caller_expects_besides_100_continue_is_refused(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n"
    answer = await raw(stack, head + b"Expect: wonders\r\n\r\n{}")
    assert answer.startswith(b"HTTP/1.1 417 ")
    assert b'"expectation_failed"' in answer
    answer = await raw(stack, head.replace(b"/v1", b"/no") + b"Expect: wonders\r\n\r\n{}")
    assert answer.startswith(b"HTTP/1.1 4")
    assert "Traceback" not in (stack.folder / "gateway.log").read_text()


async def test_a_body_that_is_too_large_is_not_asked_for(stack: Stack, http: aiohttp.ClientSession) -> None:
    """Who asks first is told before it has sent anything; who may send is told so once."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n"
    )
    for size, says in ((3 << 20, b"HTTP/1.1 413 "), (2, b"HTTP/1.1 100 Continue\r\n\r\n")):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        try:
            writer.write(head.format(size).encode())
            async with asyncio.timeout(60):
                assert (await reader.readexactly(len(says))) == says
                if size == 2:
                    writer.write(b"{}")
                    assert b" 400 " in await reader.readline()
        finally:
            writer.close()


async def test_equal_request_ids_of_callers_do_not_meet(http: aiohttp.ClientSession) -> None:
    """The caller's id names nothing inside: both run, and neither sees the other's words or id."""

    async def ask(word: str) -> str:
        body = {
            **CHAT,
            "messages": [{"role": "user", "content": f"{word} " * 50}],
            "stream": True,
            "request_id": "same",
            "sampling_params_list": [{"chunk_sleep_s": 0.002}, None, None],
        }
        headers = {"X-Request-Id": "same-" + "i" * 4000}
        async with http.post("/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200
            assert len(response.headers["x-request-id"]) < 64
            return await response.text()

    first, second = await asyncio.gather(ask("left"), ask("right"))
    assert first.count("left") == 50
    assert second.count("right") == 50
    for mine, other in ((first, "right"), (second, "left")):
        assert other not in mine
        assert "same-" not in mine
