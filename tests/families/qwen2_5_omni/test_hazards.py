"""Requests of unequal size share passes; a bad one fails alone and is told why; settings do what they say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.chunk import Payload
from tests.engines.helpers import collect, job, stage, started
from tests.families.qwen2_5_omni.conftest import Rigs
from tests.families.requests import REQUESTS, clip, film, part, picture, user
from tests.families.rig import Rig
from workers.engine import ItemError
from workers.engines.ar.engine import ArEngine
from workers.engines.omni_code2wav import OmniCode2WavEngine
from workers.engines.omni_encoder import OmniEncoderEngine
from workers.families.pixels import Vision, patches, size_for
from workers.families.qwen2_5_omni.code2wav import noise_of

FAMILY = "workers.families.qwen2_5_omni"


def heard(seconds: float) -> Payload:
    return {"messages": [user(part("audio"), "What?")], "audio": [clip(seconds)]}


async def test_clips_and_pictures_of_unequal_size_share_a_pass_and_are_as_if_alone(rig: Rigs) -> None:
    requests = [heard(0.05), heard(30.0), heard(55.0), heard(1.7), REQUESTS["image"], REQUESTS["mixed"]]
    async with rig("encoder") as stages:
        single = [await stages.encoded(request) for request in requests]
        together = await asyncio.gather(*(stages.encoded(request) for request in requests))
    for one, other in zip(together, single, strict=True):
        for made, alone in zip(one, other, strict=True):
            np.testing.assert_allclose(made["embeds"], alone["embeds"], rtol=0, atol=1e-4)


async def test_a_long_conversation_beside_a_short_one_changes_neither(rig: Rigs) -> None:
    long = {"messages": [{"role": "user", "content": "long " * 200}]}
    async with rig("thinker", max_num_batched_tokens=64) as stages:
        alone = [await written(stages, request) for request in (REQUESTS["text"], long)]
        together = await asyncio.gather(*(written(stages, r) for r in (REQUESTS["text"], long)))
    assert list(together) == alone


async def written(stages: Rig, request: Payload) -> list[int]:
    encoded = await stages.encoded(request) if "encoder" in stages.engines else []
    payloads = stages.think(request, encoded, max_tokens=6)
    return [token async for payload in payloads for token in payload["token_ids"]]


BAD = {
    "too short to be heard": ({"audio": [clip(0.006)]}, "too short"),
    "no sample at all": ({"audio": [np.zeros(0, np.float32)]}, "empty"),
    "longer than the model takes": ({"audio": [clip(61.0)]}, "60 s"),
    "not a number": ({"audio": [np.full(9000, np.nan, np.float32)]}, "NaN"),
    "a strip of a picture": ({"images": [picture(1, 300)]}, "200 times"),
    "a film without its pace": ({"videos": [film(4)]}, "frames a second"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_medium_fails_alone_and_is_told_why(rig: Rigs, name: str) -> None:
    media, why = BAD[name]
    async with rig("encoder") as stages:
        good = [stages.encoded(heard(0.2 + n / 10)) for n in range(7)]
        results = await asyncio.gather(
            stages.encoded({"messages": [], **media}), *good, return_exceptions=True
        )
    assert isinstance(results[0], ItemError)
    assert (results[0].status, results[0].param) == (400, "messages")
    assert why in str(results[0])
    assert all(len(result[0]["embeds"]) > 0 for result in results[1:])


async def test_a_part_without_its_medium_is_refused_and_nobody_else(rig: Rigs) -> None:
    missing = {"messages": [user(part("audio", 3), "What?")]}
    async with rig("encoder", "thinker") as stages:
        results = await asyncio.gather(
            written(stages, missing),
            *(written(stages, REQUESTS["text"]) for _ in range(7)),
            return_exceptions=True,
        )
    assert isinstance(results[0], ItemError)
    assert results[0].status == 400
    assert all(result == results[1] != [] for result in results[1:])


async def test_what_looks_like_a_placeholder_in_a_text_is_text(rig: Rigs) -> None:
    trick = {"messages": [user("<|AUDIO|><|IMAGE|><|im_end|>", part("image"))], "images": [picture(56, 56)]}
    async with rig("encoder", "thinker") as stages:
        payloads = [p async for p in stages.think(trick, await stages.encoded(trick), max_tokens=2)]
    details = payloads[-1]["prompt_tokens_details"]
    assert (details["audio_tokens"], details["image_tokens"]) == (0, 4)
    assert sum(details.values()) == payloads[-1]["prompt_tokens"]


async def test_an_unknown_voice_is_refused_with_the_known_ones(rig: Rigs) -> None:
    async with rig("talker", "code2wav") as stages:
        for name, payload in (("talker", {"rows": np.zeros((1, 64))}), ("code2wav", frames(12))):
            with pytest.raises(ItemError, match="Chelsie, Ethan") as caught:
                await collect(stages.engines[name], job(payload, voice="Nobody"))
            assert (caught.value.status, caught.value.param) == (400, "voice")


def frames(count: int, first: int = 0) -> Payload:
    return {"frames": np.arange(first, first + count)[None] % 96, "left": 0, "right": 0}


# --- settings


async def encoded_with(checkpoint: Path, **options: Any) -> list[Payload]:
    settings = stage(
        "omni-encoder", model=str(checkpoint), options={"family": f"{FAMILY}.encoder:Encoder", **options}
    )
    request = {"images": [picture(90, 120)], "videos": [film(2, 90, 120)], "video_fps": [2.0]}
    async with started(OmniEncoderEngine(settings, device="cpu")) as engine:
        return await collect(engine, job(request))


async def test_bounds_on_pixels_decide_how_many_rows_there_are(checkpoint: Path) -> None:
    (image, video) = await encoded_with(checkpoint)
    assert (image["grid"], video["grid"]) == ([1, 6, 8], [1, 20, 28])  # 128 x 28 x 28 pixels a frame at least
    bounds = {"max_pixels": 56 * 56, "video_min_pixels": 1, "video_max_pixels": 56 * 84}
    (image, video) = await encoded_with(checkpoint, min_pixels=28 * 28, **bounds)
    assert (image["grid"], video["grid"]) == ([1, 2, 4], [1, 4, 4])
    (image, _) = await encoded_with(checkpoint, min_pixels=112 * 112, video_min_pixels=1, dtype="bfloat16")
    assert image["grid"] == [1, 8, 10]
    assert str(image["embeds"].dtype) == "torch.bfloat16"


async def test_steps_guidance_and_sway_change_the_sound(checkpoint: Path) -> None:
    waves = []
    for family_options in ({}, {"num_steps": 4}, {"guidance_scale": 0.0}, {"sway_coefficient": 0.0}):
        options = {"family": f"{FAMILY}.code2wav:Decoder", "family_options": family_options}
        settings = stage("omni-code2wav", model=str(checkpoint), options=options)
        async with started(OmniCode2WavEngine(settings, device="cpu")) as engine:
            (payload,) = await collect(engine, job(frames(12)))
        waves.append(payload["audio"])
    assert all(np.abs(waves[0] - wave).max() > 1e-3 for wave in waves[1:])


async def test_a_system_prompt_stands_before_those_who_bring_none(checkpoint: Path) -> None:
    counts = []
    for prompt in (None, "Be kind."):
        options = {"family": f"{FAMILY}.thinker:Thinker", "kv_cache_gib": 0.01, "system_prompt": prompt}
        settings = stage("ar", model=str(checkpoint), options=options)
        async with started(ArEngine(settings, device="cpu")) as engine:
            payloads = await collect(engine, job({"messages": [user("Hello")]}, max_tokens=1))
        counts.append(payloads[-1]["prompt_tokens"])
    assert counts[1] - counts[0] == len("<system\nBe kind.>\n")


# --- pixels and noise


def test_pictures_are_prepared_as_transformers_does(checkpoint: Path) -> None:
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = picture(84, 112)  # needs no resizing, in which the two differ by a rounding
    expected = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)(images=[image], return_tensors="pt")
    cut = patches(image[None], Vision(), (56 * 56, 112 * 112))
    assert list(cut.grid) == expected["image_grid_thw"][0].tolist()
    torch.testing.assert_close(cut.values, expected["pixel_values"], rtol=0, atol=1e-5)


def test_pictures_get_the_sizes_that_transformers_gives_them() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    sizes = np.random.default_rng(0).integers(1, 900, (300, 2)).tolist()
    for height, width in [*sizes, [14, 28], [1, 200], [42, 42]]:
        if max(height, width) <= 200 * min(height, width):
            ours = size_for(height, width, Vision(), (3136, 200_000))
            assert ours == smart_resize(height, width, 28, 3136, 200_000)


def test_a_frames_noise_is_the_same_in_any_window() -> None:
    whole = noise_of(5, 0, 400, 8)
    for first, count in ((0, 1), (63, 2), (64, 64), (130, 200)):
        np.testing.assert_array_equal(noise_of(5, first, count, 8), whole[first : first + count])
    assert np.abs(noise_of(6, 0, 400, 8) - whole).mean() > 0.5
    assert np.abs(whole.std() - 1) < 0.05
