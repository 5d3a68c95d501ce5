"""Chats through the official client: what comes, in what order, and that each parameter has its effect."""

from __future__ import annotations

import base64
import io
import json
import wave
from typing import Any

import aiohttp
import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from broker.client import Client
from tests.gateway.stack import attempts
from tests.gateway.test_bad_requests import CHAT, USER

SAID = "one two three four five"
ASK: Any = [{"role": "user", "content": SAID}]
BOTH: Any = ["text", "audio"]


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, checked as strictly as the strictest of clients does."""
    *blocks, rest = text.split("\n\n")
    assert rest == "", "the last event ends with a blank line too"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert all(len(block) < 128 * 1024 for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    assert text.count("[DONE]") == 1
    return [json.loads(block[6:]) for block in blocks[:-1]]


async def stream(http: aiohttp.ClientSession, **fields: Any) -> list[dict[str, Any]]:
    async with http.post(
        "/v1/chat/completions", json={**CHAT, "messages": ASK, "stream": True, **fields}
    ) as r:
        assert r.status == 200, await r.text()
        assert r.content_type == "text/event-stream"
        return events(await r.text())


async def whole(http: aiohttp.ClientSession, **fields: Any) -> dict[str, Any]:
    async with http.post("/v1/chat/completions", json={**CHAT, "messages": ASK, **fields}) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def test_the_official_client_gets_text_and_audio(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(
        model="echo", messages=ASK, modalities=BOTH, audio={"voice": "alloy", "format": "wav"}, seed=7
    )
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert choice.message.content == SAID
    assert choice.finish_reason == "stop"
    assert choice.message.audio is not None
    assert choice.message.audio.transcript == SAID
    with wave.open(io.BytesIO(base64.b64decode(choice.message.audio.data))) as sound:
        assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (1, 2, 24_000)
        assert sound.getnframes() == 5 * 4800
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5 + 20
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.audio_tokens == 20  # 1 s


async def test_the_official_client_streams_text_and_audio(openai: AsyncOpenAI) -> None:
    text, transcript, speech, reasons, expiries = "", "", b"", [], 0
    async for chunk in await openai.chat.completions.create(
        model="echo", messages=ASK, modalities=BOTH, audio={"voice": "alloy", "format": "pcm16"}, stream=True
    ):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
        if delta.audio is not None:
            transcript += delta.audio.transcript or ""
            speech += base64.b64decode(delta.audio.data or "")
            expiries += delta.audio.expires_at is not None
    assert text == transcript == SAID
    assert reasons == ["stop"]
    assert expiries == 1
    assert len(speech) == 5 * 4800 * 2


async def test_typed_errors_reach_the_official_client(openai: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError) as missing:
        await openai.chat.completions.create(model="gpt-9", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as bad:
        await openai.chat.completions.create(model="echo", messages=[])
    assert bad.value.param == "messages"


async def test_models_are_listed(openai: AsyncOpenAI) -> None:
    models = [model async for model in openai.models.list()]
    assert [model.id for model in models] == ["echo", "narrow", "tiny", "digest", "senses", "sketch"]
    assert all(model.object == "model" for model in models)
    assert (await openai.models.retrieve("tiny")).id == "tiny"


@pytest.mark.parametrize("format_", ["pcm16", "pcm", "wav", "flac", "mp3", "opus", "aac"])
async def test_streamed_audio_joined_is_the_unstreamed_audio(
    http: aiohttp.ClientSession, format_: str
) -> None:
    fields = {"modalities": BOTH, "audio": {"voice": "alloy", "format": format_}, "seed": 5}
    pieces = [
        chunk["choices"][0]["delta"].get("audio", {}).get("data", "")
        for chunk in await stream(http, **fields)
    ]
    data = (await whole(http, **fields))["choices"][0]["message"]["audio"]["data"]
    one_by_one = b"".join(map(base64.b64decode, pieces))
    assert one_by_one == base64.b64decode("".join(pieces)), "pieces can be joined before or after decoding"
    expected = base64.b64decode(data)
    if format_ == "wav":  # the headers differ: one knows the length
        one_by_one, expected = one_by_one[44:], expected[44:]
    assert len(expected) > 1000
    assert one_by_one == expected


async def test_long_audio_makes_small_events(http: aiohttp.ClientSession) -> None:
    """One payload of more than 128 KiB still is cut into lines that every client can take."""
    slow = [None, {"speed": 0.25}, None]  # a word of 0.8 s
    chunks = await stream(
        http,
        messages=[{"role": "user", "content": "a"}],
        modalities=["audio"],
        audio={"voice": "alloy", "format": "pcm16"},
        sampling_params_list=slow,
    )
    data = [c["choices"][0]["delta"].get("audio", {}).get("data", "") for c in chunks]
    sound = b"".join(map(base64.b64decode, data))
    assert len(sound) == 2 * 19_200
    assert len([piece for piece in data if piece]) > 1
    assert all(len(base64.b64decode(piece)) % 2 == 0 for piece in data), "no sample is split"


@pytest.mark.parametrize("late", ["text", "audio"])
async def test_one_finish_reason_whichever_modality_ends_last(http: aiohttp.ClientSession, late: str) -> None:
    pause = {"chunk_sleep_s": 0.02}
    params = [pause, None, None] if late == "text" else [None, pause, None]
    chunks = await stream(http, modalities=BOTH, sampling_params_list=params)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-2]["choices"][0]["delta"].keys() == {"audio"}
    assert chunks[-2]["choices"][0]["delta"]["audio"].keys() == {"expires_at"}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["modality"] for chunk in chunks} == {"text", "audio"}
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_audio_leaves_before_the_text_has_ended(http: aiohttp.ClientSession, broker: Client) -> None:
    endless = [{"hang": True, "at": 3}, None, None]  # the text never ends
    body = {**CHAT, "messages": ASK, "stream": True, "modalities": BOTH, "sampling_params_list": endless}
    async with http.post("/v1/chat/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: ") and json.loads(line[6:])["modality"] == "audio":
                break
        response.close()


async def test_choices_run_side_by_side_and_each_ends_once(http: aiohttp.ClientSession) -> None:
    chunks = await stream(http, n=3, modalities=BOTH, stream_options={"include_usage": True})
    last: dict[int, Any] = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        assert last.get(choice["index"]) is None, "nothing of a choice follows its finish_reason"
        last[choice["index"]] = choice["finish_reason"]
    assert last == {0: "stop", 1: "stop", 2: "stop"}
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"text_tokens": 15, "audio_tokens": 60}
    assert chunks[-1]["usage"]["prompt_tokens"] == 5
    answer = await whole(http, n=3)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 15


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_usage_only_when_asked(http: aiohttp.ClientSession, options: Any) -> None:
    assert all("usage" not in chunk for chunk in await stream(http, stream_options=options))


async def test_usage_comes_once_in_a_chunk_of_its_own(http: aiohttp.ClientSession) -> None:
    *others, last = await stream(http, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
    assert last["choices"] == []
    assert last["usage"] == (await whole(http))["usage"]
    assert last["usage"]["total_tokens"] == 10


async def test_text_alone_never_schedules_speech(http: aiohttp.ClientSession, broker: Client) -> None:
    before = attempts(await broker.inspect("status"), "echo", "tone")
    for modalities in (None, ["text"]):
        await whole(http, modalities=modalities)
        await stream(http, modalities=modalities)
    assert attempts(await broker.inspect("status"), "echo", "tone") == before


async def test_audio_alone_has_no_content(http: aiohttp.ClientSession) -> None:
    message = (await whole(http, modalities=["audio"]))["choices"][0]["message"]
    assert message["content"] is None
    assert message["audio"]["transcript"] == SAID
    chunks = await stream(http, modalities=["audio"])
    assert all("content" not in chunk["choices"][0]["delta"] for chunk in chunks)
    assert {chunk["modality"] for chunk in chunks} == {"audio"}


async def test_parameters_have_their_effect(http: aiohttp.ClientSession) -> None:
    cut = (await whole(http, max_tokens=2))["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("one two", "length")
    assert (await whole(http, max_completion_tokens=1))["choices"][0]["message"]["content"] == "one"
    assert (await whole(http, stop="three"))["choices"][0]["message"]["content"].strip() == "one two"
    assert (await whole(http, stop=["four", "two"]))["choices"][0]["message"]["content"].strip() == "one"
    by_stage = [{"max_tokens": 3}, None, None]  # the stage's own entry wins
    assert (await whole(http, max_tokens=1, sampling_params_list=by_stage))["usage"]["completion_tokens"] == 3
    stopped = await whole(http, sampling_params_list=[{"stop": "two"}, None, None])
    assert stopped["choices"][0]["message"]["content"] == "one "
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = await whole(http, messages=[{"role": "user", "content": parts}])
    assert joined["choices"][0]["message"]["content"].split() == ["a", "b"]


async def test_metrics_when_asked(http: aiohttp.ClientSession) -> None:
    assert "metrics" not in await whole(http)
    stages = (await whole(http, metrics=True, modalities=BOTH))["metrics"]["stage_metrics"]
    assert stages.keys() == {"say", "tone"}
    assert 0 <= stages["tone"]["started_s"] <= stages["tone"]["ended_s"]
    chunks = await stream(http, metrics=True)
    assert chunks[-1]["metrics"]["stage_metrics"]["say"]["chunks"] == 5
    assert "usage" not in chunks[-1]


async def test_every_answer_is_its_own(http: aiohttp.ClientSession) -> None:
    """Requests side by side, all different: no words of another's, no speech of another's length."""
    import asyncio

    async def one(number: int) -> None:
        words = " ".join(f"n{number}w{i}" for i in range(number % 7 + 1))
        answer = await whole(
            http,
            messages=[USER, {"role": "assistant", "content": "x"}, {"role": "user", "content": words}],
            modalities=BOTH,
            audio={"voice": "alloy", "format": "pcm16"},
        )
        message = answer["choices"][0]["message"]
        assert message["content"] == message["audio"]["transcript"] == words
        sound = np.frombuffer(base64.b64decode(message["audio"]["data"]), "<i2")
        assert len(sound) == 4800 * (number % 7 + 1)

    await asyncio.gather(*map(one, range(64)))
