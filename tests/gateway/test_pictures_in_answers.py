"""Chats that are answered with a picture: whole, streamed, and refused by name."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from tests.gateway.test_images import draw


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "sketch", "messages": [{"role": "user", "content": "a red boat"}], **fields}


@pytest.mark.parametrize("modalities", [["text", "image"], ["image"]])
async def test_a_chat_answers_with_a_picture(http: aiohttp.ClientSession, modalities: list[str]) -> None:
    body = chat(modalities=modalities, seed=1, size="32x16", num_inference_steps=4)
    async with http.post("/v1/chat/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    content = answer["choices"][0]["message"]["content"]
    assert [part["type"] for part in content] == ["text", "image_url"][-len(modalities) :]
    url = content[-1]["image_url"]["url"]
    drawn = await draw(http, seed=1, size="32x16", num_inference_steps=4)
    assert url == f"data:image/png;base64,{drawn['data'][0]['b64_json']}"
    assert answer["usage"]["completion_tokens_details"]["image_tokens"] == 1


async def test_a_streamed_chat_has_its_picture_in_one_delta(openai: AsyncOpenAI) -> None:
    stream: Any = await openai.chat.completions.create(
        **chat(stream=True, seed=1, n=2), extra_body={"modalities": ["text", "image"]}
    )
    words, shown, ends = {0: "", 1: ""}, [], []
    async for chunk in stream:
        choice = chunk.choices[0]
        if isinstance(choice.delta.content, list):
            assert chunk.modality == "image"
            shown.append((choice.index, choice.delta.content[0]["image_url"]["url"]))
        else:
            words[choice.index] += choice.delta.content or ""
        ends += [choice.finish_reason] if choice.finish_reason else []
    assert set(words.values()) == {"a red boat"}
    assert sorted(index for index, _ in shown) == [0, 1]
    assert len({url for _, url in shown}) == 2
    assert ends == ["stop", "stop"]


CHAT_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"modalities": ["image"], "size": "9x8"}, "size"),
    ({"modalities": ["image"], "num_inference_steps": 0}, "num_inference_steps"),
    ({"modalities": ["image"], "guidance_scale": 21}, "guidance_scale"),
    ({"modalities": ["text"], "size": "8x8"}, "size"),
    ({"negative_prompt": "x"}, "negative_prompt"),
    ({"modalities": ["image", "video"]}, "modalities"),
    ({"modalities": ["image"], "messages": [{"role": "system", "content": "x"}]}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_ROWS)
async def test_a_chat_that_can_not_be_drawn_is_refused_by_name(
    http: aiohttp.ClientSession, fields: dict[str, Any], param: str
) -> None:
    async with http.post("/v1/chat/completions", json=chat(**fields)) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, param), error
