"""Pictures, clips and videos in a chat reach the stages as they were sent, in the order given.

The pipeline `senses` answers with a checksum of all that its stages got, so one word says whether every
pixel, sample and part is right.
"""

from __future__ import annotations

import asyncio
import base64
import random
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from openai import AsyncOpenAI

from broker.client import Client
from broker.gateway import films, media
from broker.gateway.models import Model
from broker.gateway.settings import Settings
from broker.gateway.uploads import Pixels
from tests.gateway.stack import Stack, empty, pipelines, reaches, until
from tests.gateway.test_bad_requests import part, refused
from tests.gateway.test_disconnects import connect, leave
from tests.gateway.test_films import MP4, film
from tests.gateway.test_pictures import HOSTILE, NOISE, png
from tests.gateway.test_uploads import file, tone
from workers.engines.function import checksum

SENSES = Model(next(pipeline for pipeline in pipelines() if pipeline.name == "senses"), 0)
BOUNDS = films.bounds(Settings())


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(array: np.ndarray) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(png(array))}}


def video(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": uri(data, "video/mp4")}}


def clip(data: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def noise(height: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def digest(payload: dict[str, Any], *, looked: bool = True) -> str:
    """What `senses` says of a payload."""
    return f"{checksum(payload, checksum(payload) if looked else 0):08x}"


async def said(http: aiohttp.ClientSession, content: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "senses", "messages": [{"role": "user", "content": content}], **fields}
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


def words(answer: dict[str, Any]) -> str:
    content: str = answer["choices"][0]["message"]["content"]
    return content


async def test_pixels_of_a_png_arrive_to_the_bit(openai: AsyncOpenAI) -> None:
    picture = noise(211, 307, 1)
    content: Any = [text("what is this?"), image(picture)]
    answer = await openai.chat.completions.create(
        model="senses", messages=[{"role": "user", "content": content}]
    )
    parts = [text("what is this?"), {"type": "image", "index": 0}]
    expected = {"messages": [{"role": "user", "content": parts}], "images": [picture]}
    assert answer.choices[0].message.content == digest(expected)


async def test_many_parts_keep_their_order(openai: AsyncOpenAI) -> None:
    pictures = [noise(20, 30, 1), noise(300, 200, 2), noise(1, 1, 3)]
    sound = await file("wav", 0.5)
    samples = await media.decode(sound, "clip", max_s=1)
    turn: Any = [image(pictures[0]), text("then"), clip(sound), image(pictures[1]), video(MP4), clip(sound)]
    answer = await openai.chat.completions.create(
        model="senses",
        messages=[
            {"role": "system", "content": "Look."},
            {"role": "user", "content": turn},
            {"role": "assistant", "content": "I see."},
            {"role": "user", "content": [text("and"), image(pictures[2])]},  # type: ignore[list-item, misc]
        ],
    )
    seen = await films.decode(MP4, "film", BOUNDS, pixels=Pixels(1))
    expected = {
        "messages": [
            {"role": "system", "content": "Look."},
            {
                "role": "user",
                "content": [
                    {"type": "image", "index": 0},
                    text("then"),
                    {"type": "audio", "index": 0},
                    {"type": "image", "index": 1},
                    {"type": "video", "index": 0},
                    {"type": "audio", "index": 1},
                ],
            },
            {"role": "assistant", "content": "I see."},
            {"role": "user", "content": [text("and"), {"type": "image", "index": 2}]},
        ],
        "audio": [samples, samples],
        "images": pictures,
        "videos": [seen.frames],
        "video_fps": [seen.fps],
    }
    assert answer.choices[0].message.content == digest(expected)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.audio_tokens == 10  # twice half a second


async def test_a_videos_own_sound_is_heard_where_it_is_asked_for(http: aiohttp.ClientSession) -> None:
    data = film(20, kind="webm", sound=tone(1.0, 48_000))
    sound = await file("wav", 0.5)
    content = [clip(sound), video(data)]
    seen = await films.decode(data, "film", BOUNDS, pixels=Pixels(1), sound_s=5)
    samples = await media.decode(sound, "clip", max_s=1)
    expected: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": [{"type": "audio", "index": 0}, {"type": "video", "index": 0}]}
        ],
        "audio": [samples],
        "videos": [seen.frames],
        "video_fps": [seen.fps],
    }
    assert words(await said(http, content)) == digest(expected)
    asked = {"use_audio_in_video": False}
    assert words(await said(http, content, mm_processor_kwargs=asked)) == digest(expected)
    expected["audio"].append(seen.sound)
    expected["messages"][0]["content"][1]["audio"] = 1
    asked = {"use_audio_in_video": True}
    assert words(await said(http, content, mm_processor_kwargs=asked)) == digest(expected)


async def test_a_stage_for_media_runs_for_any_of_them_and_not_for_text(http: aiohttp.ClientSession) -> None:
    for content in ([image(NOISE)], [clip(await file("wav", 0.2))], [video(MP4)]):
        stages = (await said(http, content, metrics=True))["metrics"]["stage_metrics"]
        assert list(stages) == ["look", "sum"]
    answer = await said(http, "only words", metrics=True)
    assert list(answer["metrics"]["stage_metrics"]) == ["sum"]
    expected = {"messages": [{"role": "user", "content": "only words"}]}
    assert words(answer) == digest(expected, looked=False)


async def test_large_pictures_lie_in_shared_memory_until_they_are_done_with(
    stack: Stack, broker: Client
) -> None:
    """By handle, never through the broker, which counts them."""
    pictures = [noise(300, 400, seed) for seed in range(3)]
    body = {
        "model": "senses",
        "messages": [{"role": "user", "content": [image(picture) for picture in pictures]}],
        "sampling_params_list": [{"hang": True}, {}],
    }
    connection = connect(stack, "/v1/chat/completions", body)
    status = await reaches(broker, 60.0, running=1)
    assert status["tables"]["blocks"] == 3
    leave(connection, "FIN")
    await empty(broker)


async def test_a_gateway_that_waits_for_an_answer_keeps_no_pixels(stack: Stack, broker: Client) -> None:
    """They lie in shared memory by then: 75 MB, that a small file became."""

    def private_mb() -> float:
        status = Path(f"/proc/{stack.processes['gateway'].pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) / 1024

    body = {
        "model": "senses",
        "messages": [{"role": "user", "content": [image(np.zeros((5000, 5000, 3), np.uint8))]}],
        "sampling_params_list": [{"hang": True}, {}],
    }
    before = private_mb()
    connection = connect(stack, "/v1/chat/completions", body)
    await reaches(broker, 60.0, running=1)
    until(lambda: private_mb() - before < 25, "the pixels to go")
    leave(connection, "FIN")
    await empty(broker)


async def test_eight_callers_at_once_get_their_own(http: aiohttp.ClientSession) -> None:
    drawn = random.Random(5)

    async def ask(number: int) -> tuple[str, str]:
        pictures = [
            noise(drawn.randrange(1, 200), drawn.randrange(1, 200), 10 * number + i) for i in range(3)
        ]
        content = [text(str(number)), *map(image, pictures)]
        parts = [text(str(number)), *({"type": "image", "index": i} for i in range(3))]
        expected = {"messages": [{"role": "user", "content": parts}], "images": pictures}
        return words(await said(http, content)), digest(expected)

    for got, expected in await asyncio.gather(*map(ask, range(8))):
        assert got == expected


LISTEN = "messages[0].content[1]"
PICTURE, VIDEO = f"{LISTEN}.image_url.url", f"{LISTEN}.video_url.url"


def picture_part(url: Any, **more: Any) -> dict[str, Any]:
    return part(type="image_url", image_url={"url": url, **more})


def video_part(url: Any) -> dict[str, Any]:
    return part(type="video_url", video_url={"url": url})


ROWS: list[tuple[dict[str, Any], str]] = [
    (picture_part(None), PICTURE),
    (picture_part(""), PICTURE),
    (picture_part("/etc/passwd"), PICTURE),
    (picture_part("file:///etc/passwd"), PICTURE),
    (picture_part("http://127.0.0.1:1/x.png"), PICTURE),
    (picture_part("http://169.254.169.254/"), PICTURE),
    (picture_part("data:image/png,hello"), PICTURE),
    (picture_part("data:image/png;base64,!!!"), PICTURE),
    (picture_part("data:image/png;base64,AAAA"), PICTURE),
    (picture_part(uri(HOSTILE["a jpeg less its last 128 bytes"])), PICTURE),
    (picture_part(uri(MP4)), PICTURE),
    (picture_part(uri(png(NOISE)), detail="blurred"), f"{LISTEN}.image_url.detail"),
    (part(type="image_url", image_url=uri(png(NOISE))), f"{LISTEN}.image_url"),
    (part(type="image_url"), f"{LISTEN}.image_url"),
    (video_part("file:///etc/passwd"), VIDEO),
    (video_part("http://[::1]/a.mp4"), VIDEO),
    (video_part("a.mp4"), VIDEO),
    (video_part(uri(png(NOISE))), VIDEO),
    (video_part(uri(MP4[: len(MP4) // 2])), VIDEO),
    ({**video_part(uri(MP4)), "mm_processor_kwargs": {"use_audio_in_video": True}}, VIDEO),
    ({"mm_processor_kwargs": {"fps": 1}}, "mm_processor_kwargs"),
    ({"mm_processor_kwargs": {"use_audio_in_video": "x"}}, "mm_processor_kwargs.use_audio_in_video"),
    ({"sampling_params_list": [{}, {}, {}]}, "sampling_params_list"),
]


async def test_bad_media_are_named_and_nothing_is_queued(http: aiohttp.ClientSession, broker: Client) -> None:
    chat = {"model": "senses", "messages": [{"role": "user", "content": "hello"}]}
    before = (await broker.inspect("status"))["pipelines"]["senses"]["stages"]["sum"]["tasks"]["attempts"]
    for change, param in ROWS:
        await refused(http, "/v1/chat/completions", {**chat, **change}, param)
    after = (await broker.inspect("status"))["pipelines"]["senses"]["stages"]["sum"]["tasks"]["attempts"]
    assert after == before
    await said(http, "still there?")


async def test_a_pipeline_says_what_it_does_not_take(http: aiohttp.ClientSession) -> None:
    for model, content, what in (
        ("echo", image(NOISE), "echo takes no images"),
        ("digest", video(MP4), "digest takes no videos"),
        ("echo", clip(await file("wav", 0.2)), "echo takes no audio"),
    ):
        body = {"model": model, "messages": [{"role": "user", "content": [content]}]}
        async with http.post("/v1/chat/completions", json=body) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert error["code"] == "unsupported_modality"
        assert what in error["message"]


async def test_one_bad_picture_among_good_requests_costs_them_nothing(http: aiohttp.ClientSession) -> None:
    bad = picture_part(uri(HOSTILE["a jpeg less its last 128 bytes"]))
    rest = [said(http, [text(str(number)), image(NOISE)]) for number in range(7)]
    *good, _ = await asyncio.gather(
        *rest, refused(http, "/v1/chat/completions", {"model": "senses", **bad}, PICTURE)
    )
    assert len({words(answer) for answer in good}) == 7


async def test_parameters_may_leave_out_the_stages_that_only_media_need(http: aiohttp.ClientSession) -> None:
    """Two stages: an entry for each, or one for the stage that every request runs."""
    for entries in ([None, {"raise": "on purpose"}], [{"raise": "on purpose"}]):
        body = {
            "model": "senses",
            "messages": [{"role": "user", "content": "x"}],
            "sampling_params_list": entries,
        }
        async with http.post("/v1/chat/completions", json=body) as response:
            assert response.status == 500
            assert "on purpose" in (await response.json())["error"]["message"]
