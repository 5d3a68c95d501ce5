"""A failure after the first byte is told in the stream, and never looks like an orderly end."""

from __future__ import annotations

from typing import Any

import aiohttp
import openai as official
import pytest
from openai import AsyncOpenAI

from broker.client import Client
from tests.gateway.test_bad_requests import CHAT, SPEECH, works

WORDS = "one two three four five six"
ASK: Any = [{"role": "user", "content": WORDS}]

#: How the stage `say` goes wrong after three chunks.
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "raises": ({"raise": "on purpose", "at": 3}, "stage_failed"),
    "dies": ({"sleep_s": 0.1, "exit": 3, "at": 3}, "worker_died"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_error_in_mid_stream_raises_in_the_official_client(
    openai: AsyncOpenAI, broker: Client, http: aiohttp.ClientSession, fault: str
) -> None:
    params, code = FAULTS[fault]
    text, reasons = "", []
    chunks = await openai.chat.completions.create(
        model="echo", messages=ASK, stream=True, extra_body={"sampling_params_list": [params, None, None]}
    )
    with pytest.raises(official.APIError) as raised:  # noqa: PT012 - what comes before it matters too
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
            reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert text == "one two three"
    assert reasons == []
    assert raised.value.code == code
    assert raised.value.type == "server_error"
    assert "say" in raised.value.message
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["request_id"]


async def test_after_an_error_the_stream_ends_without_done(http: aiohttp.ClientSession) -> None:
    body = {
        **CHAT,
        "messages": ASK,
        "stream": True,
        "sampling_params_list": [FAULTS["raises"][0], None, None],
    }
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        text = await response.text()
    assert text.rstrip().rpartition("\n")[2].startswith('data: {"error":')
    assert "[DONE]" not in text
    assert '"finish_reason":"stop"' not in text


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_byte_has_its_own_status(
    http: aiohttp.ClientSession, stream: bool
) -> None:
    body = {**CHAT, "stream": stream, "sampling_params_list": [{"raise": "at once"}, None, None]}
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 500
        error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("server_error", "stage_failed")
    assert "at once" in error["message"]


async def test_one_failing_choice_fails_the_answer_as_a_whole(
    http: aiohttp.ClientSession, broker: Client
) -> None:
    body = {**CHAT, "n": 3, "messages": ASK, "sampling_params_list": [{"raise": "x", "at": 2}, None, None]}
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 500
        assert (await response.json())["error"]["code"] == "stage_failed"


async def test_raw_speech_that_breaks_off_is_no_whole_body(
    http: aiohttp.ClientSession, broker: Client
) -> None:
    """Raw audio has no place for an error object: the connection is cut, so the body is incomplete."""
    fault = [None, {"raise": "broken", "at": 2}, None]
    body = {**SPEECH, "input": WORDS, "response_format": "pcm", "sampling_params_list": fault}
    async with http.post("/v1/audio/speech", json=body) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    await works(http)


async def test_speech_events_that_break_off_end_with_an_error(http: aiohttp.ClientSession) -> None:
    fault = [None, {"raise": "broken", "at": 2}, None]
    body = {
        **SPEECH,
        "input": WORDS,
        "response_format": "pcm",
        "stream_format": "sse",
        "sampling_params_list": fault,
    }
    async with http.post("/v1/audio/speech", json=body) as response:
        text = await response.text()
    assert "speech.audio.delta" in text
    assert "speech.audio.done" not in text
    assert '{"error":' in text
