"""Text, codes and waveform are transformers', for every kind of input."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.graph import Window
from tests.families.qwen2_5_omni.conftest import Rigs
from tests.families.qwen2_5_omni.reference import Reference
from tests.families.requests import REQUESTS, clip, film, part, user

ONE_SHOT = Window(frames=10_000)
#: What the rules for positions make special: a film slower than its sound, and one that is longer than it.
FILMS = {
    "slow film": {
        "messages": [user(part("video", audio=0), "Well?")],
        "videos": [film(10)],
        "video_fps": [0.5],
        "audio": [clip(7.3)],
    },
    "film longer than its sound": {
        "messages": [user("See ", part("video", audio=0), part("video", 1, audio=1), "Well?")],
        "videos": [film(14), film(2)],
        "video_fps": [2.0, 2.0],
        "audio": [clip(2.6), clip(4.1)],
    },
}
ALL = REQUESTS | FILMS


@pytest.mark.parametrize("kind", ALL)
async def test_an_answer_is_transformers_own(rig: Rigs, reference: Reference, kind: str) -> None:
    expected = reference.answer(ALL[kind], 12, 33)
    async with rig() as stages:
        answer = await stages.answer(ALL[kind], text=12, frames=32, window=ONE_SHOT)
    assert answer.tokens == expected.text
    assert answer.codes.reshape(-1).tolist() == expected.codes
    assert len(expected.codes) > 5
    np.testing.assert_allclose(answer.wave, expected.wave, rtol=0, atol=1e-4)


@pytest.mark.parametrize("voice", ["Chelsie", "Ethan"])
async def test_a_voice_is_its_own(rig: Rigs, reference: Reference, voice: str) -> None:
    expected = reference.answer(REQUESTS["text"], 8, 17, voice=voice)
    async with rig() as stages:
        answer = await stages.answer(REQUESTS["text"], text=8, frames=16, window=ONE_SHOT, voice=voice)
    assert answer.codes.reshape(-1).tolist() == expected.codes
    np.testing.assert_allclose(answer.wave, expected.wave, rtol=0, atol=1e-4)


async def test_the_codes_are_those_of_transformers_padded_batch(rig: Rigs, reference: Reference) -> None:
    """With nothing put right in transformers: a batch's mask is not all ones, so it is not dropped."""
    texts = ["Hello there", "What is the longer one of two questions?"]
    requests = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    codes = reference.batch(requests, tokens=9, frames=20)
    async with rig("thinker", "talker", "code2wav") as stages:
        answers = [await stages.answer(request, text=9, frames=19) for request in requests]
    assert [answer.codes.reshape(-1).tolist() for answer in answers] == codes
