"""Pictures and clips in messages, shown to a model by vLLM: the same answers as transformers'."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from adapters.chunk import Payload
from tests.engines import checkpoints
from tests.engines.helpers import collect, stage, started, stream
from workers.engine import ItemError, Job
from workers.engines.vllm import VllmEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 8
SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 64, "kv_cache_gib": 0.05}


class House(NamedTuple):
    engine: VllmEngine
    model: Any  #: transformers'
    processor: Any


def said(*parts: Any) -> list[Payload]:
    """A conversation of one message: texts, and (kind, number) for media."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part[0], "index": part[1]}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def ask(request: Payload, **params: Any) -> Job:
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS, **params}
    resumed = params.pop("resumed", None)
    return Job("test", {"request": stream([request])}, params, 1, resumed=resumed)


def tokens_of(payloads: list[Payload]) -> list[int]:
    return [token for payload in payloads for token in payload["token_ids"]]


def expected(house: House, messages: list[Payload], **media: Any) -> list[int]:
    """transformers' answer, with its own processor."""
    import torch

    text = house.processor.apply_chat_template(messages, tokenize=False)
    inputs = house.processor(text=text, return_tensors="pt", **media)
    with torch.no_grad():
        out = house.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    return list(out[0, inputs["input_ids"].shape[1] :].tolist())


# --- pictures


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def eyes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("idefics3")
    made = checkpoints.idefics3(folder)
    settings = {
        "model": str(folder),
        "options": SETTINGS | {"engine_args": {"limit_mm_per_prompt": {"image": 3}}},
    }
    async with started(VllmEngine(stage("vllm", **settings), device="cpu")) as engine:
        yield House(engine, *made)


def picture(height: int, width: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)


async def test_pictures_are_seen_where_they_stand(eyes: House) -> None:
    images = [picture(42, 42), picture(60, 80, seed=1), picture(42, 42, seed=2)]
    cases = [
        (said("What is ", ("image", 0), "?"), [0]),
        (said("What is ", ("image", 2), "?"), [2]),  # the same tokens, other contents
        (said(("image", 1), "or", ("image", 0), "?"), [1, 0]),
        (said("No picture?"), []),
        (said(("image", 2), ("image", 2), "twice"), [2, 2]),
    ]
    answers = await asyncio.gather(
        *(collect(eyes.engine, ask({"messages": messages, "images": images})) for messages, _ in cases)
    )
    for (messages, seen), payloads in zip(cases, answers, strict=True):
        shown = [Image.fromarray(images[index]) for index in seen]
        assert tokens_of(payloads) == expected(eyes, messages, images=shown or None)
    assert len({tuple(tokens_of(payloads)) for payloads in answers}) == len(cases)


async def test_an_answer_about_a_picture_goes_on_after_a_break(eyes: House) -> None:
    request = {"messages": said("What is ", ("image", 0), "?"), "images": [picture(50, 50)]}
    params: dict[str, Any] = {"temperature": 1.0, "max_tokens": 30}
    whole = await collect(eyes.engine, ask(request, **params))
    for cut in (1, len(whole) // 2):
        rest = await collect(eyes.engine, ask(request, resumed=whole[:cut], **params))
        assert tokens_of(whole[:cut] + rest) == tokens_of(whole)
        assert rest[-1]["prompt_tokens"] == whole[-1]["prompt_tokens"]


async def test_a_placeholder_that_the_user_wrote_is_plain_text(eyes: House) -> None:
    request = {"messages": said("<image><global-img> ", ("image", 0)), "images": [picture(42, 42)]}
    payloads = await collect(eyes.engine, ask(request))
    inputs = eyes.engine._media.encode(request, {})
    image = eyes.processor.tokenizer.convert_tokens_to_ids("<image>")
    assert inputs["prompt_token_ids"].count(image) == 20  # those of five tiles
    assert payloads[-1]["prompt_tokens"] == len(inputs["prompt_token_ids"])


@pytest.mark.parametrize(
    ("messages", "media", "why"),
    [
        (
            said("Hear ", ("audio", 0)),
            {"audio": [np.zeros(800, np.float32)]},
            "no parts of type audio.*image",
        ),
        (said("Look ", ("video", 0)), {"videos": [np.zeros((2, 42, 42, 3), np.uint8)]}, "type video"),
        (said(*[("image", 0)] * 4), {"images": [picture(42, 42)]}, "at most 3 parts of type image"),
        (said(*[("image", 0)] * 3, "x" * 600), {"images": [picture(42, 42)]}, "context length is 512 tokens"),
    ],
)
async def test_what_the_model_cannot_take_is_refused_and_the_next_request_answered(
    eyes: House, messages: list[Payload], media: dict[str, Any], why: str
) -> None:
    with pytest.raises(ItemError, match=why) as caught:
        await collect(eyes.engine, ask({"messages": messages, **media}))
    assert (caught.value.status, caught.value.param) == (400, "messages")
    request = {"messages": said(("image", 0)), "images": [picture(42, 42)]}
    assert len(tokens_of(await collect(eyes.engine, ask(request)))) == TOKENS


async def test_a_model_whose_states_vllm_cannot_hand_on_is_refused_before_it_is_loaded(eyes: House) -> None:
    settings = {"model": eyes.engine.model, "options": SETTINGS | {"hidden_layers": [1]}}
    with pytest.raises(ValueError, match=r"hidden_layers: .*Idefics3ForConditionalGeneration"):
        await VllmEngine(stage("vllm", **settings), device="cpu").start()


# --- clips


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ears(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("qwen2-audio")
    made = checkpoints.qwen2_audio(folder)
    async with started(
        VllmEngine(stage("vllm", model=str(folder), options=SETTINGS), device="cpu")
    ) as engine:
        yield House(engine, *made)


async def test_clips_are_heard_where_they_stand_though_the_template_knows_texts_only(ears: House) -> None:
    random = np.random.default_rng(1)
    clips = [random.standard_normal(length, np.float32) / 8 for length in (8000, 20_001, 8000)]
    place = "Audio {}: <|audio_bos|><|AUDIO|><|audio_eos|>"
    cases = [
        (said("Say", ("audio", 0), "again"), ["Say", place.format(1), "again"], [0]),
        (said("Say", ("audio", 2), "again"), ["Say", place.format(1), "again"], [2]),
        (said(("audio", 1), ("audio", 0)), [place.format(1), place.format(2)], [1, 0]),
        (said("Silence"), ["Silence"], []),
    ]
    answers = await asyncio.gather(
        *(collect(ears.engine, ask({"messages": messages, "audio": clips})) for messages, _, _ in cases)
    )
    for (_, texts, heard), payloads in zip(cases, answers, strict=True):
        flat = [{"role": "user", "content": "\n".join(texts)}]
        sounds = {"audio": [clips[index] for index in heard], "sampling_rate": 16_000} if heard else {}
        assert tokens_of(payloads) == expected(ears, flat, **sounds)
    assert len({tuple(tokens_of(payloads)) for payloads in answers}) == len(cases)


async def test_a_clip_that_is_text_already_is_read_and_not_heard(ears: House) -> None:
    request = {"messages": said(("audio", 0), "?"), "audio": [np.zeros(8000, np.float32)]}
    work = ask(request)
    work.inputs["ears"] = stream([{"index": 0, "text": " Is it"}])
    read = await collect(ears.engine, work)
    assert tokens_of(read) == tokens_of(await collect(ears.engine, ask({"messages": said("Is it", "?")})))


# --- films, and hidden states beside them


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def screen(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    pytest.importorskip("torchvision", reason="transformers' processors of films need torchvision")
    folder = tmp_path_factory.mktemp("qwen2.5-vl")
    made = checkpoints.qwen2_5_vl(folder)
    settings = {"model": str(folder), "options": SETTINGS | {"hidden_layers": [0, 1, 2]}}
    async with started(VllmEngine(stage("vllm", **settings), device="cpu")) as engine:
        yield House(engine, *made)


async def test_films_and_pictures_are_seen_and_their_rows_handed_on(screen: House) -> None:
    import torch

    images = [picture(56, 84), picture(90, 60, seed=1)]
    films = [np.stack([picture(56, 56, seed=n) for n in range(frames)]) for frames in (4, 8)]
    cases = [
        (said("See ", ("video", 0)), [], [0]),
        (said(("video", 1), " and ", ("image", 0), "?"), [0], [1]),
        (said(("image", 1), ("video", 0), "then", ("video", 1)), [1], [0, 1]),
    ]
    # So short that time takes no more places than space: beyond that, transformers 5.19 and vllm 0.32 (and
    # older transformers) don't agree on the place of the text that follows.
    rates = [8.0, 16.0]
    request = {"images": images, "videos": films, "video_fps": rates}
    answers = await asyncio.gather(
        *(collect(screen.engine, ask({"messages": messages, **request})) for messages, _, _ in cases)
    )
    for (messages, seen, watched), payloads in zip(cases, answers, strict=True):
        text = screen.processor.apply_chat_template(messages, tokenize=False)
        inputs = screen.processor(
            text=text,
            images=[Image.fromarray(images[index]) for index in seen] or None,
            videos=[torch.from_numpy(films[index]).permute(0, 3, 1, 2) for index in watched],
            video_metadata=[
                {
                    "fps": rates[index],
                    "total_num_frames": len(films[index]),
                    "frames_indices": list(range(len(films[index]))),
                }
                for index in watched
            ],
            do_sample_frames=False,
            return_tensors="pt",
        )
        with torch.no_grad():
            out = screen.model.generate(
                **inputs,
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
                output_hidden_states=True,
                return_dict_in_generate=True,
            )
        length = inputs["input_ids"].shape[1]
        assert tokens_of(payloads) == out.sequences[0, length:].tolist()
        states = [torch.stack([layer[0] for layer in step], 1) for step in out.hidden_states]
        rows = torch.cat([payload["hidden"] for payload in payloads])
        wanted = torch.cat(states)
        assert rows.shape == wanted.shape
        assert float((rows - wanted).abs().max() / wanted.abs().max()) < 1e-3
