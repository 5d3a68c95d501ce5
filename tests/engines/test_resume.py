"""A second attempt gives what the first would have given, and computes nothing of what is out already.

For the language model see test_vllm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from adapters.chunk import Payload
from tests.engines.helpers import collect, job, stage, stream
from tests.engines.speech import cut, spoken
from tests.engines.test_whisper import SENTENCES, clip
from workers.engine import OUT, Job
from workers.engines.function import FunctionEngine
from workers.engines.vits_acoustic import VitsAcousticEngine
from workers.engines.vits_decoder import VitsDecoderEngine
from workers.engines.whisper import WhisperEngine

WORDS = {"text": "one two three four five"}


def same(left: list[Payload], right: list[Payload]) -> bool:
    """Whether payloads are equal to the bit."""
    return list(map(plain, left)) == list(map(plain, right))


def plain(payload: Payload) -> Payload:
    """A payload that can be compared."""
    return {
        key: (str(value.dtype), value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
        for key, value in payload.items()
    }


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str) -> list[None]:
    """A list that grows with each call of an object's method."""
    calls: list[None] = []
    real: Callable[..., Any] = getattr(owner, method)

    def call(*arguments: Any, **keywords: Any) -> Any:
        calls.append(None)
        return real(*arguments, **keywords)

    monkeypatch.setattr(owner, method, call)
    return calls


# --- functions


@pytest.mark.parametrize("op", ["pass", "say", "tone", "picture", "film", "sum"])
async def test_a_function_goes_on_at_each_place(op: str) -> None:
    engine = FunctionEngine(stage("function", options={"op": op}), device="cpu")
    inputs = [WORDS, {"text": "six"}]
    whole = await collect(engine, job(*inputs, sleep_s=0.0))
    for emitted in range(len(whole) + 1):
        again = await collect(engine, job(*inputs, emitted=emitted, sleep_s=0.0))
        assert again[:emitted] == [OUT] * emitted
        assert same(again[emitted:], whole[emitted:])


async def test_a_function_does_not_pause_again_for_what_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    engine = FunctionEngine(stage("function", options={"op": "say", "delay_s": 0.1}), device="cpu")
    for emitted, chunks in ((0, 5), (4, 1)):
        pauses.clear()
        assert len(await collect(engine, job(WORDS, emitted=emitted, chunk_sleep_s=0.2))) == 5
        assert pauses == [0.1, 0.2] * chunks


# --- the voice


@pytest.mark.models
@pytest.mark.asyncio(loop_scope="module")
async def test_sentences_that_are_out_are_not_spoken_again(
    acoustic: VitsAcousticEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The third has nothing to say and gives an empty payload; the fourth is so long that it gives several.
    texts = [SENTENCES[0], SENTENCES[1], "...", "and on and on it goes " * 60, SENTENCES[2]]
    whole = await spoken(acoustic, *texts)
    assert len(whole) > len(texts)
    passes = counted(monkeypatch, acoustic, "forward")
    for emitted in range(len(whole) + 1):
        passes.clear()
        again = await collect(acoustic, job(*({"text": text} for text in texts), emitted=emitted))
        assert len(again) == len(whole)
        assert same(again[emitted:], whole[emitted:])
        assert len(passes) == sum(payload["frames"].shape[1] > 0 for payload in whole[emitted:])


@pytest.mark.models
@pytest.mark.asyncio(loop_scope="module")
async def test_windows_that_are_out_are_not_decoded_again(
    decoder: VitsDecoderEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(0).standard_normal((192, 300), np.float32)
    windows = await cut([{"frames": noise[:, :200], "segment_end": True}, {"frames": noise[:, 200:]}])
    windows.insert(2, {"frames": noise[:, :4], "left": 4, "right": 0})  # gives no audio, so it does not count
    whole = await collect(decoder, job(*windows))
    assert len(whole) == len(windows) - 1
    passes = counted(monkeypatch, decoder, "forward")
    for emitted in range(len(whole) + 1):
        passes.clear()
        again = await collect(decoder, job(*windows, emitted=emitted))
        assert again[:emitted] == [OUT] * emitted
        assert same(again[emitted:], whole[emitted:])
        assert len(passes) == len(whole) - emitted


# --- the ears


@pytest.mark.models
@pytest.mark.asyncio(loop_scope="module")
async def test_of_recordings_at_most_one_window_is_heard_again(
    acoustic: VitsAcousticEngine,
    decoder: VitsDecoderEngine,
    whisper: WhisperEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clips = [await clip(acoustic, decoder, SENTENCES[2]), await clip(acoustic, decoder, *SENTENCES * 5)]
    passes = counted(monkeypatch, whisper._model, "generate_with_fallback")
    given: list[Payload] = []
    states: list[tuple[int, Payload]] = []  # with the number of payloads that were out
    after: list[int] = []  # passes when each payload came

    def attempt(resumed: list[Payload], state: Payload | None) -> Job:
        async def checkpoint(new: Payload) -> None:
            if not resumed:
                states.append((len(given), new))

        inputs = {"request": stream([{"audio": clips}])}
        params = {"prompt": "About the moon."}
        return Job("", dict(inputs), params, 1, resumed=resumed, resume_state=state, checkpoint=checkpoint)

    async for payload in whisper.run(attempt([], None)):
        given.append(payload)
        after.append(len(passes))
    windows = len(passes)
    assert windows >= 4  # one of the first clip, three and more of the second
    assert len(states) == windows - 2  # a clip's first window needs none
    borders = {1, len(given)} | {out + beside for out, _ in states for beside in (-1, 0)}
    for emitted in sorted(borders - {0}):
        state = next((state for out, state in reversed(states) if out <= emitted), None)
        passes.clear()
        assert await collect(whisper, attempt(given[:emitted], state)) == given[emitted:]
        assert len(passes) <= windows - after[emitted - 1] + 1
    emitted = len(given) - 2  # the checkpoint was lost with its worker
    assert await collect(whisper, attempt(given[:emitted], None)) == given[emitted:]
