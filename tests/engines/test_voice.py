"""The two halves of a real voice: the same in any company, in windows as at once, and deaf to rubbish."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from adapters.chunk import Payload
from pipelines.graph import Window
from tests.engines.helpers import collect, job, stage, started, until
from tests.engines.speech import cut, decoded, pcm, spoken
from workers.engine import ItemError, Job, Stream
from workers.engines.vits_acoustic import VitsAcousticEngine
from workers.engines.vits_decoder import VitsDecoderEngine, trimmed

pytestmark = [pytest.mark.models, pytest.mark.asyncio(loop_scope="module")]

SENTENCES = (
    "The capital of France is Paris.",
    "Water boils at one hundred degrees, and it freezes at zero.",
    "Yes!",
    "The moon goes around the earth about once a month.",
)


def frames(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((192, count), np.float32)


# --- the acoustic half


async def test_each_sentence_gives_a_segment_of_frames(acoustic: VitsAcousticEngine) -> None:
    payloads = await spoken(acoustic, *SENTENCES)
    assert [payload["text"] for payload in payloads] == list(SENTENCES)
    for payload in payloads:
        assert payload["frames"].dtype == np.float32
        assert payload["frames"].shape[0] == 192
        assert payload["frames"].shape[1] > 20
        assert payload["segment_end"] is True
        assert (payload["sample_rate"], payload["hop"]) == (22_050, 256)


async def test_the_first_sentence_is_spoken_before_the_second_is_known(acoustic: VitsAcousticEngine) -> None:
    stream, given = Stream([{"text": SENTENCES[0]}]), []  # type: ignore[var-annotated]
    task = asyncio.create_task(collect(acoustic, Job("test", {"thinker": stream}, {}, 1), given))
    await until(lambda: len(given) == 1)
    assert not task.done()
    stream.feed([{"text": SENTENCES[1]}], closed=True)
    await task
    assert len(given) == 2


async def test_a_seed_gives_the_same_frames_alone_and_beside_others(acoustic: VitsAcousticEngine) -> None:
    alone = [await spoken(acoustic, *SENTENCES, seed=seed) for seed in (1, 2)]
    together = await asyncio.gather(*(spoken(acoustic, *SENTENCES, seed=seed) for seed in (1, 2, 3)))
    for before, after in zip(alone, together, strict=False):
        for left, right in zip(before, after, strict=True):
            assert np.array_equal(left["frames"], right["frames"])
    assert not np.array_equal(alone[0][0]["frames"], alone[1][0]["frames"])


async def test_the_same_sentence_twice_is_not_the_same_noise_twice(acoustic: VitsAcousticEngine) -> None:
    first, second = await spoken(acoustic, SENTENCES[0], SENTENCES[0])
    assert not np.array_equal(first["frames"], second["frames"])


async def test_without_exact_sentences_share_a_pass_and_sound_the_same() -> None:
    settings = {"model": "piper-en-us-joe", "resources": {"threads": 1}}
    settings |= {"batch": {"max_batch_size": 4, "wait_ms": 5000}, "options": {"exact": False}}
    async with started(VitsAcousticEngine(stage("vits-acoustic", **settings), device="cpu")) as engine:
        together = await asyncio.gather(*(spoken(engine, text) for text in SENTENCES))
        engine.max_batch_size = 1
        for text, (payload,) in zip(SENTENCES, together, strict=True):
            (alone,) = await spoken(engine, text)
            assert alone["frames"].shape == payload["frames"].shape
            assert np.abs(alone["frames"] - payload["frames"]).max() < 5e-3


@pytest.mark.parametrize("text", ["", " ", "...", "?!", "—", "\u200b", "()"])
async def test_what_cannot_be_spoken_gives_no_frames(acoustic: VitsAcousticEngine, text: str) -> None:
    before, silent, after = await spoken(acoustic, "One.", text, "Two.")
    assert silent["frames"].shape == (192, 0)
    assert min(before["frames"].shape[1], after["frames"].shape[1]) > 20


async def test_speed_changes_the_length(acoustic: VitsAcousticEngine) -> None:
    lengths = [
        (await spoken(acoustic, SENTENCES[1], speed=speed))[0]["frames"].shape[1]
        for speed in (0.25, 0.5, 1, 2.0, 4)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[1] / lengths[2] == pytest.approx(2, rel=0.2)
    assert lengths[2] / lengths[3] == pytest.approx(2, rel=0.3)


@pytest.mark.parametrize("option", [{"length_scale": 2.0}, {"noise_scale": 0.0}, {"noise_w": 0.0}])
async def test_each_option_changes_the_voice(acoustic: VitsAcousticEngine, option: dict[str, float]) -> None:
    changed = stage("vits-acoustic", model="piper-en-us-joe", resources={"threads": 1}, options=option)
    async with started(VitsAcousticEngine(changed, device="cpu")) as engine:
        (with_option,) = await spoken(engine, SENTENCES[0])
    (without,) = await spoken(acoustic, SENTENCES[0])
    assert not np.array_equal(with_option["frames"], without["frames"])


@pytest.mark.parametrize("voice", ["", "nobody", "../../etc/passwd", "a/b", "x" * 5000])
async def test_an_unknown_voice_is_refused_with_those_there_are(
    acoustic: VitsAcousticEngine, voice: str
) -> None:
    with pytest.raises(ItemError, match="there are joe, default") as caught:
        await spoken(acoustic, SENTENCES[0], voice=voice)
    assert (caught.value.status, caught.value.param) == (400, "voice")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("params", [{"speed": 0.2}, {"speed": 4.1}, {"speed": "fast"}, {"voice": 5}])
async def test_wrong_parameters_are_refused_by_name(acoustic: VitsAcousticEngine, params: Payload) -> None:
    with pytest.raises(ItemError) as caught:
        await spoken(acoustic, SENTENCES[0], **params)
    assert (caught.value.status, caught.value.param) == (400, next(iter(params)))


async def test_both_names_of_the_voice_are_the_same_voice(acoustic: VitsAcousticEngine) -> None:
    (left,), (right,) = [await spoken(acoustic, "Hi.", voice=voice) for voice in ("joe", "default")]
    assert np.array_equal(left["frames"], right["frames"])


async def test_the_voice_goes_by_the_names_that_the_stage_gives_it() -> None:
    named = stage("vits-acoustic", model="piper-en-us-joe", options={"voices": ["anna", "ben"]})
    async with started(VitsAcousticEngine(named, device="cpu")) as engine:
        assert await spoken(engine, "Hi.", voice="ben")
        with pytest.raises(ItemError, match="there are anna, ben, default"):
            await spoken(engine, "Hi.", voice="joe")


async def test_an_endless_sentence_is_spoken_in_parts(acoustic: VitsAcousticEngine) -> None:
    payloads = await spoken(acoustic, "and on and on it goes " * 60)
    assert len(payloads) > 1
    assert all(0 < payload["frames"].shape[1] < 2000 for payload in payloads)
    assert [bool(payload["text"]) for payload in payloads] == [True] + [False] * (len(payloads) - 1)


# --- the decoder half


@pytest.mark.parametrize("count", [1, 15, 16, 17, 44, 45, 46, 61, 62, 200])
async def test_windows_joined_equal_the_decoding_at_once(decoder: VitsDecoderEngine, count: int) -> None:
    whole = {"frames": frames(count), "segment_end": True}
    at_once = await decoded(decoder, [whole])
    joined = await decoded(decoder, await cut([whole]))
    assert at_once.shape == joined.shape == (count * 256,)
    assert np.abs(at_once - joined).max() < 1e-5


async def test_windows_of_real_speech_equal_the_decoding_at_once(
    acoustic: VitsAcousticEngine, decoder: VitsDecoderEngine
) -> None:
    sentences = await spoken(acoustic, *SENTENCES)
    at_once = await decoded(decoder, sentences)
    joined = await decoded(decoder, await cut(sentences))
    assert np.abs(at_once - joined).max() < 1e-5
    assert 0.1 < np.abs(joined).max() <= 1


async def test_windows_give_the_same_samples_in_any_company(decoder: VitsDecoderEngine) -> None:
    passes = []
    forward = decoder.forward

    def counted(items: list[np.ndarray]) -> list[np.ndarray | Exception]:
        passes.append(len(items))
        return forward(items)

    decoder.forward = counted  # type: ignore[assignment,method-assign]
    jobs = [await cut([{"frames": frames(45 * n + 20, n), "segment_end": True}]) for n in range(1, 9)]
    alone = [await decoded(decoder, payloads) for payloads in jobs]
    assert set(passes) == {1}
    for company in (jobs, jobs[:3], jobs[::-1]):
        passes.clear()
        together = await asyncio.gather(*(decoded(decoder, payloads) for payloads in company))
        assert max(passes) == len(company)
        for payloads, audio in zip(company, together, strict=True):
            expected = alone[next(n for n, other in enumerate(jobs) if other is payloads)]
            assert np.array_equal(expected, audio)
            assert np.array_equal(pcm(expected), pcm(audio))


async def test_a_window_without_frames_gives_no_audio(decoder: VitsDecoderEngine) -> None:
    empty = {"frames": frames(0), "segment_end": True}
    context = {"frames": frames(4), "left": 4, "right": 0}
    assert await collect(decoder, job(empty, context)) == []


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"frames": None},
        {"frames": [[1.0]]},
        {"frames": np.zeros((192, 4), np.float64)},
        {"frames": np.zeros((80, 4), np.float32)},
        {"frames": np.zeros(192, np.float32)},
        {"frames": np.zeros((192, 4), np.float32), "left": -1},
        {"frames": np.zeros((192, 4), np.float32), "right": "1"},
    ],
)
async def test_a_window_that_makes_no_sense_fails_alone(decoder: VitsDecoderEngine, bad: Payload) -> None:
    good = {"frames": frames(20)}
    results = await asyncio.gather(
        *(collect(decoder, job(payload)) for payload in (good, bad, good)), return_exceptions=True
    )
    assert isinstance(results[1], ItemError)
    for result in (results[0], results[2]):
        assert result[0]["audio"].shape == (20 * 256,)  # type: ignore[index]


async def test_frames_with_nan_fail_their_job_and_no_other(decoder: VitsDecoderEngine) -> None:
    good, bad = frames(20), frames(20)
    bad[0, 0] = np.nan
    results = await asyncio.gather(
        *(collect(decoder, job({"frames": each})) for each in (good, bad)), return_exceptions=True
    )
    assert isinstance(results[1], ItemError)
    assert "NaN" in str(results[1])
    assert np.isfinite(results[0][0]["audio"]).all()  # type: ignore[index]


async def test_a_cancelled_job_stops_within_a_window(decoder: VitsDecoderEngine) -> None:
    windows = await cut([{"frames": frames(45 * 40), "segment_end": True}])
    given: list[Payload] = []
    task = asyncio.create_task(collect(decoder, job(*windows), given))
    await until(lambda: len(given) >= 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    reached = len(given)
    assert len(await collect(decoder, job({"frames": frames(10)}))) == 1  # the engine is free at once
    assert len(given) == reached < len(windows)


@pytest.mark.parametrize(
    ("total", "size", "left"), [(116, 25, 8), (116, 4, 25), (26, 25, 2), (1, 25, 0), (24, 25, 4)]
)
async def test_a_decoder_that_gives_fewer_samples_than_frames_loses_none_at_borders(
    total: int, size: int, left: int
) -> None:
    hop, short = 1280, 555
    ramp = np.arange(total * hop, dtype=np.float32)
    whole = {"frames": np.arange(total, dtype=np.float32)[None], "segment_end": True}
    parts = []
    for window in await cut([whole], Window(frames=size, left=left)):
        first, count = int(window["frames"][0, 0]), window["frames"].shape[1]
        audio = ramp[first * hop : (first + count) * hop][short:]  # the fake decoder
        new = count - window["left"] - window["right"]
        parts.append(trimmed(audio, left=window["left"], new=new, right=window["right"], hop=hop))
    assert np.array_equal(np.concatenate(parts), ramp[short:])
