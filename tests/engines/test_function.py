"""The function engine: what each function gives, and that wrong input is refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from adapters.chunk import Payload
from tests.engines.helpers import collect, job, stage, stream
from workers.engine import ItemError, Job
from workers.engines.function import FunctionEngine, checksum


def engine(op: str, **options: object) -> FunctionEngine:
    return FunctionEngine(stage("function", options={"op": op, **options}), device="cpu")


def asks(text: object) -> Payload:
    return {"messages": [{"role": "user", "content": "earlier"}, {"role": "user", "content": text}]}


def text(payloads: list[Payload]) -> str:
    return "".join(payload["text"] for payload in payloads)


@pytest.mark.parametrize("content", ["one two  three", " one\n two ", "x", "one two \n"])
async def test_what_say_says_joined_is_the_message(content: str) -> None:
    payloads = await collect(engine("say"), job(asks(content)))
    assert text(payloads) == content
    assert len(payloads) == len(content.split())
    assert payloads[-1]["finish_reason"] == "stop"
    assert payloads[-1]["completion_tokens"] == len(content.split())
    assert not any("finish_reason" in payload for payload in payloads[:-1])


async def test_say_joins_the_text_parts_of_a_message() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "audio", "index": 0}, {"type": "text", "text": "b"}]
    assert text(await collect(engine("say"), job(asks(parts)))) == "a b"


@pytest.mark.parametrize(
    ("limit", "said", "why"), [(0, "", "length"), (2, "one two", "length"), (9, "one two three", "stop")]
)
async def test_max_tokens_cuts_what_say_says(limit: int, said: str, why: str) -> None:
    payloads = await collect(engine("say"), job(asks("one two three"), max_tokens=limit))
    assert text(payloads) == said
    assert payloads[-1]["finish_reason"] == why


async def test_a_stop_string_ends_what_say_says() -> None:
    payloads = await collect(engine("say"), job(asks("one two three"), stop=["three", "two"]))
    assert text(payloads) == "one "
    assert payloads[-1]["finish_reason"] == "stop"


async def test_a_prompt_over_the_context_is_refused_with_both_lengths() -> None:
    small = engine("say", max_model_len=64)
    fits = await collect(small, job({"prompt": "w " * 63}))
    assert len(fits) == 1  # room for one word
    assert fits[0]["finish_reason"] == "length"
    for length in (64, 250):
        with pytest.raises(ItemError, match=rf"{length} tokens.*64") as caught:
            await collect(small, job({"prompt": "w " * length}))
        assert caught.value.status == 400


@pytest.mark.parametrize(
    "payload", [{}, {"messages": []}, {"messages": "text"}, {"messages": [1]}, asks(5), {"prompt": 5}]
)
async def test_say_refuses_what_holds_no_user_message(payload: Payload) -> None:
    with pytest.raises(ItemError) as caught:
        await collect(engine("say"), job(payload))
    assert (caught.value.status, caught.value.param) == (400, "messages")


async def test_a_tone_is_one_wave_however_its_text_was_cut() -> None:
    whole = await collect(engine("tone"), job({"text": "one two three"}))
    parts = await collect(engine("tone"), job({"text": "one"}, {"text": " two three "}, {"text": ""}))
    assert len(whole) == len(parts) == 3
    for left, right in zip(whole, parts, strict=True):
        assert np.array_equal(left["audio"], right["audio"])
    wave = np.concatenate([payload["audio"] for payload in whole])
    assert wave.dtype == np.float32
    assert wave.shape == (3 * 4800,)
    spectrum = np.abs(np.fft.rfft(wave))
    assert spectrum.argmax() * 24_000 / len(wave) == pytest.approx(440, abs=2)


async def test_each_option_of_a_tone_changes_it() -> None:
    (slow,) = await collect(engine("tone", word_s=0.5, sample_rate=8000), job({"text": "a"}))
    assert (slow["audio"].shape, slow["sample_rate"]) == ((4000,), 8000)
    (fast,) = await collect(engine("tone", word_s=0.5, sample_rate=8000), job({"text": "a"}, speed=2.0))
    assert fast["audio"].shape == (2000,)
    (high,) = await collect(
        engine("tone", word_s=0.5, sample_rate=8000, frequency_hz=880), job({"text": "a"})
    )
    assert not np.array_equal(high["audio"], slow["audio"])


async def test_a_picture_has_one_colour_that_depends_on_the_text() -> None:
    pictures = []
    for words in ({"text": "a"}, {"text": "b"}):
        (payload,) = await collect(engine("picture", size=8), job(words))
        assert payload["image"].shape == (8, 8, 3)
        assert payload["image"].dtype == np.uint8
        assert len(np.unique(payload["image"].reshape(-1, 3), axis=0)) == 1
        pictures.append(payload["image"])
    assert not np.array_equal(*pictures)


async def test_all_that_is_asked_of_a_picture_shows_in_it() -> None:
    asked = {"prompt": "a"}
    rows = [
        job(asked),
        job({**asked, "negative_prompt": ""}),
        job(asked, seed=2),
        job(asked, num_inference_steps=3),
        job(asked, guidance_scale=0.0),
    ]
    colours = {tuple((await collect(engine("picture"), row))[0]["image"][0, 0]) for row in rows}
    assert len(colours) == len(rows)
    *partial, last = await collect(engine("picture"), job(asked, width=6, height=4, partial_images=2))
    assert [payload["partial"] for payload in partial] == [0, 1]
    assert all(payload["image"].shape == (4, 6, 3) for payload in (*partial, last))
    assert "partial" not in last


async def test_a_given_picture_is_tinted_where_the_mask_says() -> None:
    given, mask = np.zeros((4, 6, 3), np.uint8), np.zeros((4, 6), np.uint8)
    mask[:, 3:] = 255
    (new,) = await collect(engine("picture"), job({"prompt": "a"}))
    (payload,) = await collect(
        engine("picture"), job({"prompt": "a", "images": [given], "mask": mask}, strength=1.0)
    )
    assert not payload["image"][:, :3].any()
    assert (payload["image"][:, 3:] == new["image"][0, 0]).all()
    with pytest.raises(ItemError, match="mask"):
        await collect(engine("picture"), job({"prompt": "a", "images": [given], "mask": mask[:2]}))


@pytest.mark.parametrize("frames", [1, 2, 5])
async def test_a_film_has_the_frames_that_are_asked_for(frames: int) -> None:
    payloads = await collect(
        engine("film"), job({"prompt": "a"}, num_frames=frames, fps=3.0, width=6, height=4)
    )
    assert {payload["fps"] for payload in payloads} == {3.0}
    assert np.concatenate([payload["frames"] for payload in payloads]).shape == (frames, 4, 6, 3)


async def test_a_sum_does_not_depend_on_the_order_of_edges() -> None:
    one, two = {"image": np.zeros((2, 2), np.uint8)}, {"audio": np.ones(3, np.float32), "sample_rate": 8000}
    sums = []
    for order in ((("a", one), ("b", two)), (("b", two), ("a", one))):
        work = Job("test", {name: stream([payload]) for name, payload in order}, {}, 1)
        sums += await collect(engine("sum"), work)
    assert sums[0] == sums[1]
    assert len(sums[0]["text"]) == 8


def test_a_checksum_sees_every_part_of_a_payload() -> None:
    base = {"x": np.arange(4, dtype=np.float32), "n": 1, "l": [1, [2]], "b": b"\0", "d": {"k": None}}
    changes: list[Payload] = [
        {"x": np.arange(4, dtype=np.int32)},
        {"x": np.arange(4, dtype=np.float32).reshape(2, 2)},
        {"x": np.arange(4, dtype=np.float32)[::-1]},
        {"n": 2},
        {"n": "1"},
        {"l": [1, 2]},
        {"b": b"\1"},
        {"d": {"k": 0}},
        {"d": {}},
    ]
    sums = {checksum(base), *(checksum({**base, **change}) for change in changes)}
    assert len(sums) == len(changes) + 1


@pytest.mark.parametrize("params", [{}, {"sleep_s": 0.0}])
async def test_pass_hands_payloads_on_as_they_are(params: dict[str, float]) -> None:
    payloads = [{"text": str(number), "frames": np.zeros(number)} for number in range(4)]
    given = await collect(engine("pass"), job(*payloads, **params))
    assert [id(payload) for payload in given] == [id(payload) for payload in payloads]


async def test_pass_joins_several_inputs_in_the_order_of_edges() -> None:
    work = Job("test", {"b": stream([{"n": 1}, {"n": 2}]), "a": stream([{"n": 3}])}, {}, 1)
    assert await collect(engine("pass"), work) == [{"n": 1}, {"n": 2}, {"n": 3}]


@pytest.mark.parametrize("op", ["tone", "picture"])
async def test_text_that_is_no_string_is_refused(op: str) -> None:
    with pytest.raises(ItemError) as caught:
        await collect(engine(op), job({"text": 5}))
    assert (caught.value.status, caught.value.param) == (400, "text")
