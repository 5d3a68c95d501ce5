"""Whisper: hears what the voice says, makes nothing of nothing, refuses what it can't read."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from adapters.chunk import Payload
from tests.engines.helpers import collect, job, until
from tests.engines.speech import Audio, at_16_khz, decoded, spoken, word_errors
from workers.engine import ItemError
from workers.engines.vits_acoustic import VitsAcousticEngine
from workers.engines.vits_decoder import VitsDecoderEngine
from workers.engines.whisper import WhisperEngine

pytestmark = [pytest.mark.models, pytest.mark.asyncio(loop_scope="module")]

SENTENCES = (
    "I think that we should go to the market before it closes this evening.",
    "Please open the window and let some fresh air into the room.",
    "The moon goes around the earth about once a month.",
)


async def clip(acoustic: VitsAcousticEngine, decoder: VitsDecoderEngine, *sentences: str) -> Audio:
    return at_16_khz(await decoded(decoder, await spoken(acoustic, *sentences)), 22_050)


def heard(payloads: list[Payload], index: int = 0) -> str:
    return "".join(payload["text"] for payload in payloads if payload["index"] == index)


async def test_it_writes_down_what_the_voice_says(
    acoustic: VitsAcousticEngine, decoder: VitsDecoderEngine, whisper: WhisperEngine
) -> None:
    audio = await clip(acoustic, decoder, *SENTENCES)
    payloads = await collect(whisper, job({"messages": [], "audio": [audio]}))
    assert word_errors(" ".join(SENTENCES), heard(payloads)) <= 0.15
    *segments, end = payloads
    assert end["done"] is True
    assert end["duration"] == pytest.approx(len(audio) / 16_000)
    times = [time for segment in segments for time in (segment["start"], segment["end"])]
    assert times == sorted(times)
    assert times[-1] <= end["duration"]
    assert {payload["language"] for payload in payloads} == {"en"}


async def test_several_clips_keep_their_numbers(
    acoustic: VitsAcousticEngine, decoder: VitsDecoderEngine, whisper: WhisperEngine
) -> None:
    moon, window = [await clip(acoustic, decoder, SENTENCES[n]) for n in (2, 1)]
    payloads = await collect(whisper, job({"audio": [moon, np.zeros(0, np.float32)]}, {"audio": [window]}))
    assert "moon" in heard(payloads, 0).lower()
    assert heard(payloads, 1) == ""
    assert "window" in heard(payloads, 2).lower()
    assert [payload["index"] for payload in payloads if payload.get("done")] == [0, 1, 2]


@pytest.mark.parametrize("samples", [0, 1, 368, 399, 1599, 1600, 48_000])
async def test_a_clip_with_nothing_in_it_gives_an_empty_transcript(
    whisper: WhisperEngine, samples: int
) -> None:
    payloads = await collect(whisper, job({"audio": [np.zeros(samples, np.float32)]}))
    (end,) = payloads
    assert (end["text"], end["done"]) == ("", True)
    assert end["duration"] == pytest.approx(samples / 16_000)


async def test_bad_clips_fail_alone_beside_good_ones(
    acoustic: VitsAcousticEngine, decoder: VitsDecoderEngine, whisper: WhisperEngine
) -> None:
    good = await clip(acoustic, decoder, SENTENCES[2])
    bad = [
        np.zeros((2, 100), np.float32),
        np.zeros(16_000, np.int16),
        np.full(16_000, np.nan, np.float32),
        "text",
    ]
    clips = [good, *bad, np.zeros(368, np.float32), good]
    results = await asyncio.gather(
        *(collect(whisper, job({"audio": [each]})) for each in clips), return_exceptions=True
    )
    for result in results[1:5]:
        assert isinstance(result, ItemError)
        assert (result.status, result.param) == (400, "audio")
    for result in (results[0], results[6]):
        assert "moon" in heard(result).lower()  # type: ignore[arg-type]
    assert heard(results[5]) == ""  # type: ignore[arg-type]


async def test_a_job_without_clips_gives_nothing(whisper: WhisperEngine) -> None:
    assert await collect(whisper, job({"messages": []})) == []


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"language": "xx"}, "language"),
        ({"language": 5}, "language"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1.5}, "temperature"),
        ({"prompt": ["a"]}, "prompt"),
    ],
)
async def test_wrong_parameters_are_refused_by_name(
    whisper: WhisperEngine, params: Payload, name: str
) -> None:
    with pytest.raises(ItemError, match=name) as caught:
        await collect(whisper, job({"audio": [np.zeros(16_000, np.float32)]}, **params))
    assert (caught.value.status, caught.value.param) == (400, name)


async def test_a_prompt_teaches_spelling(
    acoustic: VitsAcousticEngine, decoder: VitsDecoderEngine, whisper: WhisperEngine
) -> None:
    audio = await clip(acoustic, decoder, "My friend Cathy was here on Monday.")
    for name in ("Cathy", "Kathie"):
        assert name in heard(await collect(whisper, job({"audio": [audio]}, prompt=f"About {name}.")))


async def test_a_cancelled_transcription_stops_at_its_segment(
    acoustic: VitsAcousticEngine, decoder: VitsDecoderEngine, whisper: WhisperEngine
) -> None:
    audio = await clip(acoustic, decoder, *SENTENCES)
    given: list[Payload] = []
    task = asyncio.create_task(collect(whisper, job({"audio": [audio] * 20}), given))
    await until(lambda: bool(given))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    reached = len(given)
    payloads = await collect(whisper, job({"audio": [audio[:16_000]]}))  # the thread is free again
    assert payloads[-1]["done"] is True
    assert len(given) == reached
