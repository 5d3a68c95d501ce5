"""Company, streaming and breaks change nothing of an answer; what windows change of its sound is measured."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from adapters.chunk import Payload
from adapters.window import windows
from pipelines.catalog import pipelines
from pipelines.graph import Pipeline, Window
from pipelines.qwen2_5_omni.transfers import replies
from tests.engines.helpers import stream
from tests.families.qwen2_5_omni.conftest import Rigs
from tests.families.qwen2_5_omni.reference import Reference
from tests.families.requests import REQUESTS
from tests.families.rig import Answer, Rig
from workers.engine import Job, Stream

HOP = 480  #: samples of a code
#: Text and frames of eight unequal requests.
LIMITS = [(12, 16), (3, 9), (12, 1), (20, 40), (7, 12), (12, 6), (2, 3), (16, 26)]


def the_window() -> Window:
    """The pipeline's."""
    document = yaml.safe_load(pipelines()["qwen2_5_omni"].read_text())
    return next(e.window for e in msgspec.convert(document, Pipeline).edges if e.window is not None)


async def all_of(payloads: Any) -> list[Payload]:
    return [payload async for payload in payloads]


async def decoded(stages: Rig, codes: list[int], window: Window, seed: int = 1, emitted: int = 0) -> Any:
    """code2wav's payloads for some codes, which come in sixes."""
    frames = np.array([codes], np.int64)
    given = [{"frames": frames[:, n : n + 6]} for n in range(0, len(codes), 6)]
    job = Job("test", {"talker": windows(stream([*given, {"finish_reason": "stop"}]), window)}, {}, seed)
    job.emitted = emitted
    return await all_of(stages.engines["code2wav"].run(job))


def joined(payloads: list[Payload]) -> Any:
    return np.concatenate([payload["audio"] for payload in payloads])


async def test_eight_unequal_requests_at_once_are_eight_single_ones(rig: Rigs) -> None:
    work = list(zip([*REQUESTS.values(), REQUESTS["text"]], LIMITS, strict=True))
    # Few rows a step, so that prompts are read in pieces beside others' steps.
    async with rig(max_num_batched_tokens=48) as stages:
        single = [await stages.answer(request, text=text, frames=frames) for request, (text, frames) in work]
        together = await asyncio.gather(
            *(stages.answer(request, text=text, frames=frames) for request, (text, frames) in work)
        )
    for one, other in zip(together, single, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_array_equal(one.codes, other.codes)
        np.testing.assert_allclose(one.wave, other.wave, rtol=0, atol=1e-4)


async def test_what_is_streamed_is_what_comes_stage_after_stage(rig: Rigs) -> None:
    request = REQUESTS["audio"]
    async with rig() as stages:
        streamed = await stages.answer(request)
        text = await all_of(stages.think(request, await stages.encoded(request), max_tokens=12))
        heard = await all_of(replies(stream(text)))
        frames = await all_of(stages.talk(stream(heard), max_tokens=17))
    assert len(streamed.text) == 12
    assert Answer(text=text).tokens == streamed.tokens
    np.testing.assert_array_equal(Answer(frames=frames).codes, streamed.codes)


async def test_the_talker_speaks_while_the_thinker_writes(rig: Rigs) -> None:
    async with rig("encoder", "thinker", "talker") as stages:
        text = await all_of(stages.think(REQUESTS["text"], [], max_tokens=20, min_tokens=20))
        heard = Stream(text[:15])
        payloads = stages.talk(replies(heard), max_tokens=30, min_tokens=30)
        # Fifteen payloads bring the prompt and fourteen tokens: enough for the first twelve frames.
        early = await anext(payloads)
        waiting = asyncio.ensure_future(anext(payloads))
        other = await all_of(stages.talk(replies(stream(text)), max_tokens=30, min_tokens=30))
        assert not waiting.done()
        heard.feed(text[15:], closed=True)
        late = [await waiting, *[payload async for payload in payloads]]
    np.testing.assert_array_equal(Answer(frames=[early, *late]).codes, Answer(frames=other).codes)


async def test_windows_of_sound_are_transformers_decodes_of_the_same_windows(
    rig: Rigs, reference: Reference
) -> None:
    window, codes = the_window(), [n * 37 % 96 for n in range(131)]
    async with rig("code2wav") as stages:
        made = await decoded(stages, codes, window, seed=7)
    starts = [0, *range(window.first, len(codes), window.frames)]
    pieces = []
    for start, stop in zip(starts, [*starts[1:], len(codes)], strict=True):
        left = min(window.left, start)
        wave = reference.wave(codes[start - left : stop + window.right], seed=7, place=start - left)
        pieces.append(wave[left * HOP : (left + stop - start) * HOP])
    assert [len(payload["audio"]) for payload in made] == [len(piece) for piece in pieces]
    np.testing.assert_allclose(joined(made), np.concatenate(pieces), rtol=0, atol=1e-4)


async def test_what_windows_change_of_the_sound_is_as_little_as_documented(
    rig: Rigs, reference: Reference
) -> None:
    """docs/pipelines.md gives these figures; without context a window's borders are heard."""
    codes = np.random.default_rng(3).integers(0, 96, 150).tolist()
    whole = reference.wave(codes, seed=7)
    async with rig("code2wav") as stages:
        apart = {
            context: error(joined(await decoded(stages, codes, window, seed=7)), whole)
            for context, window in {
                "pipeline": the_window(),
                "none": Window(frames=72, first=24),
                "more": Window(frames=72, first=24, left=36, right=24),
            }.items()
        }
    assert apart["pipeline"] < 0.003
    assert apart["more"] < 0.0003
    assert apart["none"] > 0.05


def error(wave: Any, whole: Any) -> float:
    """The difference's root mean square, as a share of the whole's."""
    return math.sqrt(((wave - whole) ** 2).mean() / (whole**2).mean())


async def test_answers_that_end_near_a_windows_border_lose_no_sample(rig: Rigs) -> None:
    async with rig("code2wav") as stages:
        for frames in (0, 1, 23, 24, 25, 37, 96, 97):
            made = await decoded(stages, [n % 96 for n in range(frames)], the_window())
            assert sum(len(payload["audio"]) for payload in made) == frames * HOP


async def test_an_answer_of_one_token_is_silent(rig: Rigs) -> None:
    async with rig() as stages:
        answer = await stages.answer(REQUESTS["text"], text=1)
    assert len(answer.tokens) == 1
    assert answer.frames == answer.sound == []


async def test_sound_goes_on_with_the_first_window_that_is_not_out(rig: Rigs) -> None:
    codes = [n * 5 % 96 for n in range(120)]
    async with rig("code2wav") as stages:
        whole = await decoded(stages, codes, the_window())
        rest = await decoded(stages, codes, the_window(), emitted=1)
    assert rest[0] == {}
    np.testing.assert_array_equal(joined(rest[1:]), joined(whole[1:]))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_a_thinker_that_goes_on_writes_what_it_would_have_written(
    rig: Rigs, temperature: float
) -> None:
    request, params = REQUESTS["mixed"], {"max_tokens": 14, "temperature": temperature}
    async with rig("encoder", "thinker") as stages:
        encoded = await stages.encoded(request)
        whole = await all_of(stages.think(request, encoded, **params))
        for done in (1, 7, len(whole) - 1):
            small = [{k: v for k, v in p.items() if k not in ("rows", "positions")} for p in whole[:done]]
            inputs = {"request": stream([request]), "encoder": stream(encoded)}
            again = {"emitted": done, "resumed": small, "consumers": frozenset({"talker"})}
            rest = await all_of(stages.engines["thinker"].run(Job("test", inputs, params, 1, **again)))
            assert len(rest) == len(whole) - done
            for one, other in zip(rest, whole[done:], strict=True):
                assert (one["text"], one["token_ids"]) == (other["text"], other["token_ids"])
                np.testing.assert_allclose(one["rows"], other["rows"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_a_talker_that_goes_on_says_what_it_would_have_said(rig: Rigs, temperature: float) -> None:
    params = {"max_tokens": 44, "temperature": temperature}
    async with rig("thinker", "talker") as stages:
        text = await all_of(stages.think(REQUESTS["text"], [], max_tokens=8))
        whole = await all_of(stages.talk(replies(stream(text)), **params))
        for done in range(1, len(whole)):
            small = [{"codes": p["codes"], "voice": p["voice"]} for p in whole[:done]]
            job = Job("test", {"thinker": replies(stream(text))}, params, 1, emitted=done, resumed=small)
            rest = await all_of(stages.engines["talker"].run(job))
            np.testing.assert_array_equal(
                Answer(frames=whole[:done] + rest).codes, Answer(frames=whole).codes
            )
