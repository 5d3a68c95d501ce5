"""How much of pictures, clips and videos one request, and one gateway, may hold."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image

from broker.gateway.errors import ApiError
from broker.gateway.messages import to_payload
from broker.gateway.room import Room
from broker.gateway.schemas import ChatMessage, ImageLink, ImageLinkPart, Link, Part, TextPart, VideoLinkPart
from broker.gateway.settings import Settings
from tests.gateway.stack import Stack
from tests.gateway.test_films import MP4
from tests.gateway.test_media_in_chats import SENSES, image, noise, said, text, uri, words
from tests.gateway.test_pictures import NOISE, claims, png, saved


async def place(parts: Iterable[Part], **settings: Any) -> tuple[str | None, int, str | None]:
    """Where these parts' error is said to be, with what status and code."""
    try:
        await to_payload([ChatMessage("user", [*parts])], SENSES, Settings(**settings))
    except ApiError as error:
        return error.param, error.status, error.code
    return None, 200, None


def pictured(data: bytes, detail: Any = None) -> ImageLinkPart:
    return ImageLinkPart(ImageLink(uri(data), detail))


async def test_each_bound_has_its_effect() -> None:
    small, film_ = pictured(png(NOISE)), VideoLinkPart(Link(uri(MP4)))
    url, video_url = "messages[0].content[1].image_url.url", "messages[0].content[1].video_url.url"
    words_ = TextPart("look")
    rows: list[tuple[list[Part], dict[str, Any], tuple[str | None, int, str | None]]] = [
        ([small, small], {"max_images": 1}, ("messages[0].content[1]", 400, "too_many_images")),
        ([film_, film_], {"max_videos": 1}, ("messages[0].content[1]", 400, "too_many_videos")),
        ([words_, small], {"max_image_mb": 0.001}, (url, 413, "image_too_large")),
        ([words_, small], {"max_image_mp": 0.0008}, (url, 413, "image_too_large")),
        ([words_, small], {"max_image_mp": 0.00086}, (None, 200, None)),
        ([words_, pictured(claims(10**5, 10**4))], {}, (url, 413, "image_too_large")),
        ([small, small], {"max_pixels_mp": 0.001}, (url, 413, "too_many_pixels")),
        ([small, film_], {"max_pixels_mp": 0.001}, (video_url, 413, "too_many_pixels")),
        ([words_, film_], {"max_video_mb": 0.001}, (video_url, 413, "video_too_large")),
        ([words_, film_], {"max_video_mp": 0.001}, (video_url, 413, "video_too_large")),
        ([words_, film_], {"max_video_decode_s": 1e-9}, (video_url, 413, "video_too_large")),
        ([words_, film_], {"max_video_s": 1.0}, (video_url, 413, "video_too_long")),
        ([words_, film_], {"max_video_s": 2.1}, (None, 200, None)),
    ]
    for parts, settings, expected in rows:
        assert await place(parts, **settings) == expected, settings


async def test_media_count_for_as_long_as_they_are_held() -> None:
    """At most so many bytes in one gateway, and room again when the last that held some has gone."""
    room, settings = Room(NOISE.nbytes * 2.5 / 2**20), Settings()
    message = ChatMessage("user", [pictured(png(NOISE))])
    held = [await to_payload([message], SENSES, settings, room=room) for _ in range(2)]
    with pytest.raises(ApiError) as refused_:
        await to_payload([message], SENSES, settings, room=room)
    assert (refused_.value.status, refused_.value.code) == (503, "overloaded")
    assert refused_.value.headers() == {"Retry-After": "1"}
    with pytest.raises(ApiError, match="holds"):
        await to_payload([ChatMessage("user", [VideoLinkPart(Link(uri(MP4)))])], SENSES, settings, room=room)
    del held[0]
    await to_payload([message], SENSES, settings, room=room)
    with pytest.raises(ApiError):
        await to_payload([message, message], SENSES, settings, room=room)
    gc.collect()  # pytest keeps the error with its frames, in a cycle
    await to_payload([message], SENSES, settings, room=room)  # what was refused half-way holds nothing


async def test_a_gateway_with_little_room_tells_callers_to_come_back(stack: Stack) -> None:
    async with aiohttp.ClientSession(stack.another_gateway("little", "--max-decoded-mb", "0.1")) as http:
        body = {"model": "senses", "messages": [{"role": "user", "content": [image(noise(300, 300, 1))]}]}
        async with http.post("/v1/chat/completions", json=body) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        bad = {"type": "image_url", "image_url": {"url": uri(png(NOISE)[:-100])}}
        broken = {"model": "senses", "messages": [{"role": "user", "content": [image(NOISE), bad]}]}
        for number in range(50):  # together they are more than there is room for
            assert words(await said(http, [text(str(number)), image(NOISE)]))
            async with http.post("/v1/chat/completions", json=broken) as response:
                assert response.status == 400, await response.text()
    assert stack.end("little") == 0


async def frames(**settings: Any) -> tuple[int, ...]:
    message = ChatMessage("user", [VideoLinkPart(Link(uri(MP4)))])
    shape: tuple[int, ...] = (await to_payload([message], SENSES, Settings(**settings)))["videos"][0].shape
    return shape


async def test_settings_say_what_is_kept_of_a_video() -> None:
    assert await frames() == (4, 48, 64, 3)
    assert await frames(video_fps=5.0) == (10, 48, 64, 3)
    assert await frames(video_fps=5.0, max_frames=6) == (6, 48, 64, 3)
    assert await frames(max_frame_mp=0.000768) == (4, 24, 32, 3)


async def test_a_low_level_of_detail_is_shrunk_at_the_door() -> None:
    big = saved(Image.new("RGB", (1024, 1024)))
    for detail, edge in ((None, 1024), ("auto", 1024), ("high", 1024), ("low", 512)):
        payload = await to_payload([ChatMessage("user", [pictured(big, detail)])], SENSES, Settings())
        assert payload["images"][0].shape == (edge, edge, 3)


@pytest.mark.parametrize(
    "name",
    [name for name in Settings.__struct_fields__ if re.search("clip|image|video|frame|pixels|audio", name)],
)
def test_the_docs_say_each_bound_on_media(name: str) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    assert f"`--{name.replace('_', '-')}` {getattr(Settings(), name):g}" in docs


async def test_what_no_shared_memory_can_hold_is_a_413(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's may be small; here a gateway may have 1 MiB of it."""
    monkeypatch.setenv("OMNI_SHM_MB", "1")
    url = stack.another_gateway("small")
    async with aiohttp.ClientSession(url) as http:
        body = {"model": "senses", "messages": [{"role": "user", "content": [image(noise(600, 600, 1))]}]}
        async with http.post("/v1/chat/completions", json=body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (413, "too_large")
            assert "OMNI_SHM_MB" in error["message"]
        assert words(await said(http, [image(NOISE)]))
    assert stack.end("small") == 0
