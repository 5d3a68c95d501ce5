"""What callers are told of a pipeline, and what its answers' tokens are counted as."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from broker.gateway.answer import Answer, usage_of
from broker.gateway.errors import ApiError
from broker.gateway.metrics import Unwatched
from broker.gateway.models import Model
from broker.gateway.plan import ChatPlan
from pipelines.graph import REQUEST, Edge, Endpoint, Pipeline, Stage

TALKS = Model(
    Pipeline(
        "talks",
        {"text": "think", "audio": "talk"},
        {"think": Stage("function"), "talk": Stage("function", options={"voices": ["Chelsie", "Ethan"]})},
        [Edge(REQUEST, "think"), Edge("think", "talk")],
        {"chat": Endpoint(outputs=["text", "audio"])},
        ["image"],
    ),
    0,
)


async def test_the_list_says_what_each_takes_and_gives(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/models") as response:
        cards = {card["id"]: card for card in (await response.json())["data"]}
    assert cards["senses"]["input_modalities"] == ["text", "audio", "image", "video"]
    assert cards["senses"]["output_modalities"] == ["text"]
    assert cards["senses"]["stages"] == ["look", "sum"]
    assert cards["echo"]["input_modalities"] == ["text"]
    assert cards["echo"]["output_modalities"] == ["text", "audio"]
    assert cards["echo"]["endpoints"] == ["chat", "speech"]
    assert cards["sketch"]["output_modalities"] == ["text", "image", "video"]


def test_a_pipeline_may_take_media_without_a_stage_of_their_own() -> None:
    card = TALKS.card()
    assert card["input_modalities"] == ["text", "image"]
    assert card["voices"] == ["Chelsie", "Ethan"]


def test_voices_are_found_in_any_spelling() -> None:
    assert TALKS.voice("ethan", "voice") == "Ethan"
    assert TALKS.voice("Chelsie", "voice") == "Chelsie"
    assert TALKS.voice("alloy", "voice") is None
    with pytest.raises(ApiError, match="there are Chelsie, Ethan, default"):
        TALKS.voice("Chels", "voice")


PLAN = ChatPlan(
    id="0" * 24,
    model="talks",
    created=0,
    modalities=["text"],
    outputs=["text"],
    audio_format="wav",
    include_usage=True,
    include_metrics=False,
    heard_tokens=30,
)


@pytest.mark.parametrize(
    ("counted", "total", "details"),
    [
        (None, 50, (20, 30, None, None)),  # the stage read 20 words; others heard for it
        ({"audio_tokens": 12}, 20, (8, 12, None, None)),
        ({"audio_tokens": 2, "image_tokens": 4, "video_tokens": 8}, 20, (6, 2, 4, 8)),
        ({"text_tokens": 16, "image_tokens": 4}, 20, (16, 0, 4, None)),
    ],
)
async def test_a_prompts_tokens_count_once(
    counted: dict[str, int] | None, total: int, details: tuple[int | None, ...]
) -> None:
    answer = Answer(None, Unwatched())
    last: dict[str, Any] = {"text": "", "finish_reason": "stop", "prompt_tokens": 20, "completion_tokens": 3}
    await answer.take("text", last if counted is None else {**last, "prompt_tokens_details": counted})
    usage = usage_of(PLAN, [answer])
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (total, 3, total + 3)
    parts = usage.prompt_tokens_details
    found = (parts.text_tokens, parts.audio_tokens, parts.image_tokens, parts.video_tokens)
    assert tuple(value if isinstance(value, int) else None for value in found) == details
