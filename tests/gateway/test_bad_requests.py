"""One field wrong at a time: refused with its name, nothing queued, and the next request succeeds.

Rows about pictures and videos are in :mod:`tests.gateway.test_media_in_chats`; none of the pipelines here
takes them, so that every such part is refused.
"""

from __future__ import annotations

import base64
from typing import Any

import aiohttp
import pytest

from broker.client import Client
from tests.gateway.stack import CONTEXT, attempts

USER = {"role": "user", "content": "hello"}
CHAT = {"model": "echo", "messages": [USER]}
SPEECH = {"model": "echo", "input": "hello", "voice": "alloy"}


def content(value: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": value}]}


def part(**fields: Any) -> dict[str, Any]:
    return content([{"type": "text", "text": "listen"}, fields])


def clip(data: str, format_: str = "wav") -> dict[str, Any]:
    return part(type="input_audio", input_audio={"data": data, "format": format_})


LISTEN = "messages[0].content[1]"

CHAT_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    (content(None), "messages[0].content"),
    (content(""), "messages[0].content"),
    (content([]), "messages[0].content"),
    (content(5), "messages[0].content"),
    (part(type="hologram"), f"{LISTEN}.type"),
    (part(text="no type"), f"{LISTEN}.type"),
    (part(type="text"), f"{LISTEN}.text"),
    (part(type="image_url", image_url={"url": "http://127.0.0.1:1/x.png"}), LISTEN),
    (part(type="image_url", image_url={"url": "data:image/png;base64,AAAA"}), LISTEN),
    (part(type="audio_url", audio_url={"url": "file:///etc/passwd"}), LISTEN),
    (clip(base64.b64encode(bytes(64)).decode()), LISTEN),
    ({"modalities": ["video"]}, "modalities"),
    ({"modalities": []}, "modalities"),
    ({"modalities": ["audio", "audio"]}, "modalities"),
    ({"modalities": ["checksum"]}, "modalities"),
    ({"modalities": "text"}, "modalities"),
    ({"modalities": ["audio"], "audio": {"voice": "nobody"}}, "audio.voice"),
    ({"modalities": ["audio"], "audio": {"format": "mpeg"}}, "audio.format"),
    ({"modalities": ["audio"], "audio": {"format": "m" * 50_000}}, "audio.format"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_completion_tokens": 10**12}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": 3}, "stop"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"sampling_params_list": [{}]}, "sampling_params_list"),
    ({"sampling_params_list": [{}, {"temperature": "x"}, {}]}, "sampling_params_list[1].temperature"),
    ({"sampling_params_list": [{}, {"of_my_own": [{"a": 10**30}]}, {}]}, "sampling_params_list[1]"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logprobs": True}, "logprobs"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"extra_body": {"seed": 1}}, "extra_body"),
    ({"min_p": 0.1}, "min_p"),
    ({"stop_token_ids": [5]}, "stop_token_ids"),
    ({"guided_json": {}}, "guided_json"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"final_stage_id": 99}, "final_stage_id"),
    ({"width": 512}, "width"),
]

SPEECH_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"input": ""}, "input"),
    ({"input": " \n"}, "input"),
    ({"input": None}, "input"),
    ({"input": "a" * 5000}, "input"),
    ({"voice": ""}, "voice"),
    ({"voice": "nobody"}, "voice"),
    ({"voice": "../../etc/passwd"}, "voice"),
    ({"voice": "..\\x"}, "voice"),
    ({"voice": "a/b"}, "voice"),
    ({"voice": "v" * 5000}, "voice"),
    ({"voice": {"id": "voice_1234"}}, "voice"),
    ({"voice": 7}, "voice"),
    ({"response_format": "mpeg"}, "response_format"),
    ({"response_format": "ogg"}, "response_format"),
    ({"stream": "wrong_type"}, "stream"),
    ({"stream_format": "websocket"}, "stream_format"),
    ({"stream": False, "stream_format": "sse"}, "stream"),
    ({"instructions": 123}, "instructions"),
    ({"instructions": "speak like a pirate"}, "instructions"),
    ({"speed": 0.2}, "speed"),
    ({"speed": 4.1}, "speed"),
    ({"speed": "fast"}, "speed"),
    ({"extra_body": {"speed": 2}}, "extra_body"),
]


async def refused(http: aiohttp.ClientSession, path: str, body: dict[str, Any], param: str) -> None:
    async with http.post(path, json=body) as response:
        error = (await response.json())["error"]
        assert response.status == 400, error
        assert response.content_type == "application/json"
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert len(error["message"]) < 500


async def works(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/chat/completions", json=CHAT) as response:
        assert response.status == 200
        assert (await response.json())["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_chat_fields_are_named_and_nothing_is_queued(
    http: aiohttp.ClientSession, broker: Client, stream: bool
) -> None:
    before = attempts(await broker.inspect("status"), "echo", "say")
    for change, param in CHAT_ROWS:
        if stream and "stream_options" in change and "stream" not in change:
            continue  # right in a stream
        await refused(http, "/v1/chat/completions", {**CHAT, "stream": stream, **change}, param)
    assert attempts(await broker.inspect("status"), "echo", "say") == before
    await works(http)


async def test_bad_speech_fields_are_named_and_nothing_is_queued(
    http: aiohttp.ClientSession, broker: Client
) -> None:
    before = attempts(await broker.inspect("status"), "echo", "tone")
    for change, param in SPEECH_ROWS:
        await refused(http, "/v1/audio/speech", {**SPEECH, **change}, param)
    assert attempts(await broker.inspect("status"), "echo", "tone") == before
    await works(http)


async def test_unsupported_values_list_what_is_supported(http: aiohttp.ClientSession) -> None:
    rows = [
        ("/v1/chat/completions", {**CHAT, "modalities": ["video"]}, ["text", "audio"]),
        ("/v1/audio/speech", {**SPEECH, "voice": "nobody"}, ["default"]),
        ("/v1/audio/speech", {**SPEECH, "response_format": "mpeg"}, ["aac, flac, mp3, opus, pcm, wav"]),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "robot", "content": "x"}]}, ["user"]),
        ("/v1/chat/completions", {**CHAT, **part(type="hologram")}, ["input_audio", "image_url"]),
        ("/v1/chat/completions", {**CHAT, "sampling_params_list": []}, ["say, tone, sum"]),
        (
            "/v1/chat/completions",
            {"messages": [USER], "model": "gpt"},
            ["echo, narrow, tiny, digest, senses, sketch"],
        ),
        ("/v1/chat/completions", {"messages": [USER]}, ["echo, narrow, tiny, digest, senses, sketch"]),
        ("/v1/audio/speech", {**SPEECH, "model": "narrow"}, ["chat"]),
    ]
    for path, body, words in rows:
        async with http.post(path, json=body) as response:
            assert response.status in (400, 404)
            message = (await response.json())["error"]["message"]
        assert all(word in message for word in words), message


async def test_fields_that_ask_for_nothing_are_accepted(http: aiohttp.ClientSession) -> None:
    neutral: dict[str, Any] = {
        "ignore_eos": True,
        "repetition_penalty": 1.0,
        "logprobs": None,
        "top_k": -1,
        "min_tokens": 0,
        "presence_penalty": 0.0,
        "response_format": {"type": "text"},
        "tools": [],
        "min_p": 0.0,
        "extra_body": {},
        "user": "somebody",
        "store": False,
        "unheard_of": {"a": [1]},
    }
    async with http.post("/v1/chat/completions", json={**CHAT, **neutral}) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize("words", [CONTEXT - 1, CONTEXT, 250])
@pytest.mark.parametrize("max_tokens", [None, 0, -1, 1, 10**9])
@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_around_the_context_limit(
    http: aiohttp.ClientSession, words: int, max_tokens: int | None, stream: bool
) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "w " * words}],
        "max_tokens": max_tokens,
        "stream": stream,
    }
    async with http.post("/v1/chat/completions", json=body) as response:
        text = await response.text()
        fits = words < CONTEXT and (max_tokens is None or max_tokens > 0)
        assert response.status == (200 if fits else 400), text
        if fits:
            assert '"finish_reason":"length"' in text
        elif max_tokens is None or max_tokens > 0:
            assert str(words) in text
            assert str(CONTEXT) in text
