"""How much one request may hold: each bound is refused with its number, and costs nobody else anything."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import aiohttp
import pytest

from broker.gateway.errors import ApiError
from broker.gateway.messages import to_payload
from broker.gateway.schemas import AudioPart, ChatMessage, InputAudio
from broker.gateway.settings import Settings
from tests.gateway.test_bad_requests import CHAT, USER, works
from tests.gateway.test_uploads import VOICE, file

TEXT_PART = {"type": "text", "text": "x"}


ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("messages", {"messages": [USER] * 1025}, "1024"),
    ("messages[0].content", {"messages": [{"role": "user", "content": [TEXT_PART] * 65}]}, "64"),
    ("stop", {"stop": ["x"] * 17}, "16"),
    ("stop[0]", {"stop": ["x" * 1025]}, "1024"),
    ("n", {"n": 17}, "16"),
    ("n", {"n": 10**9}, "16"),
]


@pytest.mark.parametrize(("param", "change", "limit"), ROWS)
async def test_a_bound_is_named_with_its_number(
    http: aiohttp.ClientSession, param: str, change: dict[str, Any], limit: str
) -> None:
    async with http.post("/v1/chat/completions", json={**CHAT, **change}) as response:
        error = (await response.json())["error"]
        assert response.status == 400
    assert error["param"] == param
    assert limit in error["message"]
    await works(http)


async def test_clips_are_counted() -> None:
    import base64

    clip = AudioPart(InputAudio(base64.b64encode(await file("wav", 0.2)).decode(), "wav"))
    parts, settings = [clip] * 3, Settings(max_clips=3)
    payload = await to_payload([ChatMessage("user", [*parts])], VOICE, settings)
    assert len(payload["audio"]) == 3
    with pytest.raises(ApiError, match="more than 3 clips") as refused:
        await to_payload([ChatMessage("user", [*parts]), ChatMessage("user", [clip])], VOICE, settings)
    assert refused.value.param == "messages[1].content[0]"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "GZIP", "x"])
async def test_a_compressed_body_is_a_415(http: aiohttp.ClientSession, encoding: str) -> None:
    """Whatever it would become: nothing is unpacked."""
    bomb = b" " * (64 << 20)
    data = zlib.compress(bomb, 9) if encoding == "deflate" else gzip.compress(bomb, 9)
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    async with http.post("/v1/chat/completions", data=data, headers=headers) as response:
        assert response.status == 415
        assert (await response.json())["error"]["code"] == "compressed"
    await works(http)


async def test_a_body_that_says_it_is_not_compressed_is_taken(http: aiohttp.ClientSession) -> None:
    headers = {"Content-Encoding": "identity", "Content-Type": "application/json"}
    async with http.post("/v1/chat/completions", data=json.dumps(CHAT), headers=headers) as response:
        assert response.status == 200


async def test_a_field_that_is_a_list_and_is_not_is_a_400(http: aiohttp.ClientSession) -> None:
    form = aiohttp.FormData()
    form.add_field("file", b"x", filename="x.wav")
    form.add_field("language", "en")
    form.add_field("language[]", "en")
    async with http.post("/v1/audio/transcriptions", data=form) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "language"
    await works(http)


async def test_headers_without_end_are_a_400(http: aiohttp.ClientSession) -> None:
    headers = {f"X-Header-{number}": "x" for number in range(1000)}
    async with http.post("/v1/chat/completions", json=CHAT, headers=headers) as response:
        assert response.status == 400
    await works(http)


@pytest.mark.parametrize("depth", [10, 100, 300, 500, 700, 900, 990, 2000])
async def test_deep_parameters_never_reach_past_the_door(http: aiohttp.ClientSession, depth: int) -> None:
    """What the gateway can read, each process behind it must be able to read too."""
    value = "[" * depth + "]" * depth
    body = json.dumps({**CHAT, "sampling_params_list": [{"unheard_of": 0}, None, None]})
    async with http.post("/v1/chat/completions", data=body.replace("0}", value + "}")) as response:
        assert response.status in (200, 400), await response.text()
    await works(http)
