"""Company, streaming and breaks change nothing of an answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.chunk import Payload
from adapters.window import windows
from pipelines.graph import Window
from pipelines.qwen3_omni.transfers import spoken
from tests.engines.helpers import stream
from tests.families.qwen3_omni.reference import Reference
from tests.families.requests import REQUESTS
from tests.families.rig import Answer, Rig, running
from workers.engine import Job, Stream

#: Text and frames of eight unequal requests.
LIMITS = [(12, 16), (3, 9), (12, 1), (20, 24), (7, 12), (12, 6), (2, 3), (16, 20)]
SHORT = Window(frames=4, first=2, left=3)


def requests() -> list[Payload]:
    """Eight: those of all kinds, and one more."""
    return [*REQUESTS.values(), REQUESTS["text"]]


async def all_of(payloads: Any) -> list[Payload]:
    return [payload async for payload in payloads]


def same(one: Answer, other: Answer) -> None:
    assert one.tokens == other.tokens
    np.testing.assert_array_equal(one.codes, other.codes)
    np.testing.assert_allclose(one.wave, other.wave, rtol=0, atol=1e-4)


async def test_eight_unequal_requests_at_once_are_eight_single_ones(checkpoint: Path) -> None:
    # Few rows a step, so that prompts are read in pieces beside others' steps.
    async with running(checkpoint, max_num_batched_tokens=48) as rig:
        work = list(zip(requests(), LIMITS, strict=True))
        single = [await rig.answer(request, text=text, frames=frames) for request, (text, frames) in work]
        together = await asyncio.gather(
            *(rig.answer(request, text=text, frames=frames) for request, (text, frames) in work)
        )
    for one, other in zip(together, single, strict=True):
        same(one, other)


async def test_what_is_streamed_is_what_comes_stage_after_stage(checkpoint: Path) -> None:
    request = REQUESTS["audio"]
    async with running(checkpoint) as rig:
        streamed = await rig.answer(request)
        text = await all_of(rig.think(request, await rig.encoded(request), max_tokens=12))
        heard = await all_of(spoken(stream(text)))
        frames = await all_of(rig.talk(stream(heard), max_tokens=17))
    assert len(streamed.text) > 1
    assert len(streamed.frames) > 1
    assert Answer(text=text).tokens == streamed.tokens
    np.testing.assert_array_equal(Answer(frames=frames).codes, streamed.codes)


async def test_the_talker_speaks_while_the_thinker_writes_and_waits_for_it_alone(checkpoint: Path) -> None:
    async with running(checkpoint) as rig:
        text = await all_of(rig.think(REQUESTS["text"], [], max_tokens=12))
        heard = Stream(text[:4])
        payloads = rig.talk(spoken(heard), max_tokens=17)
        # Of four tokens three are certain, of which the first is the prompt's: rows for two frames more.
        early = [await anext(payloads) for _ in range(3)]
        waiting = asyncio.ensure_future(anext(payloads))
        other = await rig.answer(REQUESTS["image"], frames=6)
        assert not waiting.done()
        heard.feed(text[4:], closed=True)
        late = [await waiting, *[payload async for payload in payloads]]
        whole = await all_of(rig.talk(spoken(stream(text)), max_tokens=17))
    np.testing.assert_array_equal(Answer(frames=early + late).codes, Answer(frames=whole).codes)
    assert other.codes.shape[1] == 6


async def test_windows_of_sound_are_those_of_transformers_decoder(
    checkpoint: Path, reference: Reference
) -> None:
    async with running(checkpoint) as rig:
        answer = await rig.answer(REQUESTS["text"], frames=23, window=SHORT)
    codes, hop = answer.codes, int(reference.model.code2wav.total_upsample)
    lost = hop - len(reference.decoded(codes[:, :1]))  # of a pass, at its end
    starts = [0, *range(SHORT.first, codes.shape[1], SHORT.frames)]
    pieces = []
    for start, stop in zip(starts, [*starts[1:], codes.shape[1]], strict=True):
        left = min(SHORT.left, start)
        wave = reference.decoded(codes[:, start - left : stop])
        pieces.append(wave[max(0, left * hop - lost) :])
    assert [len(payload["audio"]) for payload in answer.sound] == [len(piece) for piece in pieces]
    np.testing.assert_allclose(answer.wave, np.concatenate(pieces), rtol=0, atol=1e-4)
    assert len(answer.wave) == len(reference.decoded(codes)) == codes.shape[1] * hop - lost


@pytest.mark.parametrize("frames", [1, 2, 3, 6, 7])
async def test_answers_that_end_at_a_windows_border_lose_nothing(
    checkpoint: Path, reference: Reference, frames: int
) -> None:
    codes = np.arange(4 * frames).reshape(4, frames) % 64
    payloads = [{"frames": codes[:, n : n + 1].astype(np.int32), "voice": "ethan"} for n in range(frames)]
    async with running(checkpoint, "code2wav") as rig:
        cut = windows(stream([*payloads, {"finish_reason": "stop"}]), Window(frames=4, first=2, left=20))
        made = await all_of(rig.engines["code2wav"].run(Job("test", {"talker": cut}, {}, 1)))
    wave = np.concatenate([payload["audio"] for payload in made])
    np.testing.assert_allclose(wave, reference.decoded(codes), rtol=0, atol=1e-4)


async def test_an_answer_without_a_word_is_silent(checkpoint: Path) -> None:
    async with running(checkpoint) as rig:
        answer = await rig.answer(REQUESTS["text"], text=1)
    assert len(answer.tokens) == 1
    assert answer.frames == answer.sound == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_thinker_that_goes_on_writes_what_it_would_have_written(
    checkpoint: Path, temperature: float
) -> None:
    request = REQUESTS["mixed"]
    async with running(checkpoint, "encoder", "thinker") as rig:
        encoded = await rig.encoded(request)
        whole = await all_of(rig.think(request, encoded, max_tokens=14, temperature=temperature))
        for done in (1, 7, len(whole) - 1):
            params = {"max_tokens": 14, "temperature": temperature}
            rest = await all_of(resumed(rig, request, encoded, whole[:done], params))
            assert Answer(text=whole[:done] + rest).tokens == Answer(text=whole).tokens
            assert "".join(p["text"] for p in rest) == "".join(p["text"] for p in whole[done:])
            assert {**rest[-1], "text": "", "token_ids": []} == {**whole[-1], "text": "", "token_ids": []}


def resumed(
    rig: Rig, request: Payload, encoded: list[Payload], done: list[Payload], params: dict[str, Any]
) -> Any:
    """A thinker's second attempt, which knows the small fields of what the first one gave."""
    inputs = {"request": stream([request]), "encoder": stream(encoded)}
    small = [{k: v for k, v in payload.items() if k not in ("user_ids", "hidden")} for payload in done]
    job = Job(
        "test",
        inputs,
        params,
        1,
        attempt=2,
        emitted=len(done),
        resumed=small,
        consumers=frozenset({"talker"}),
    )
    return rig.engines["thinker"].run(job)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_a_talker_that_goes_on_says_what_it_would_have_said(
    checkpoint: Path, temperature: float
) -> None:
    async with running(checkpoint, "thinker", "talker") as rig:
        text = await all_of(rig.think(REQUESTS["text"], [], max_tokens=8))
        whole = await all_of(rig.talk(spoken(stream(text)), max_tokens=15, temperature=temperature))
        for done in (1, 6, len(whole) - 1):
            small = [{"codes": p["codes"], "voice": p["voice"]} for p in whole[:done]]
            job = Job(
                "test",
                {"thinker": spoken(stream(text))},
                {"max_tokens": 15, "temperature": temperature},
                1,
                attempt=2,
                emitted=done,
                resumed=small,
            )
            rest = await all_of(rig.engines["talker"].run(job))
            np.testing.assert_array_equal(
                Answer(frames=whole[:done] + rest).codes, Answer(frames=whole).codes
            )


async def test_a_seed_decides_all_codes_of_a_frame(checkpoint: Path) -> None:
    async with running(checkpoint, "thinker", "talker") as rig:
        text = await all_of(rig.think(REQUESTS["text"], [], max_tokens=8))
        codes = []
        for seed in (1, 1, 2):
            job = Job("test", {"thinker": spoken(stream(text))}, {"max_tokens": 9}, seed)
            codes.append(Answer(frames=await all_of(rig.engines["talker"].run(job))).codes)
    np.testing.assert_array_equal(codes[0], codes[1])
    width = min(codes[0].shape[1], codes[2].shape[1])
    assert all(
        (one != other).any() for one, other in zip(codes[0][:, :width], codes[2][:, :width], strict=True)
    )
