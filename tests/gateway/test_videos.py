"""Films as jobs: what is asked arrives, what is refused is named, and nothing of a deleted one stays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
from openai import AsyncOpenAI

from broker.client import Client
from tests.films import played
from tests.gateway.stack import attempts, empty, reaches
from tests.gateway.test_images import BLACK, DRAW, file

FILM = {**DRAW, "seed": 1, "num_frames": 5, "size": "32x16"}
LONG = {"num_frames": None}
LIST = "sampling_params_list[2]"
HALF = [None, None, {"hang": True, "at": 1}, None]  #: of the frames is there, the rest never comes

ROWS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": " "}, "prompt", "text"),
    ({"prompt": "a" * 4097}, "prompt", "4096"),
    ({"size": "100000x10000"}, "size", "64"),
    ({"seconds": "ten"}, "seconds", ""),
    ({"seconds": "0", **LONG}, "seconds", "33"),
    ({"seconds": 0}, "seconds", ""),
    ({"seconds": "60", **LONG}, "seconds", "33 frames"),
    ({"seconds": "1"}, "num_frames", "not both"),
    ({"num_frames": 0}, "num_frames", "from 1 to 33"),
    ({"num_frames": 10**6}, "num_frames", "from 1 to 33"),
    ({"num_frames": 6}, "num_frames", "multiple of 4"),
    ({"fps": 0}, "fps", "0"),
    ({"fps": 4e-4}, "fps", "0.1"),  # a film's file would have 24, and its job 12500 seconds
    ({"num_inference_steps": 0}, "num_inference_steps", "from 1 to 50"),
    ({"guidance_scale": 21}, "guidance_scale", "from 0 to 20"),
    ({"sampling_params_list": [None, None, {"num_frames": 34}, None]}, f"{LIST}.num_frames", "33"),
    ({"sampling_params_list": [None, None, {"fps": 1e9}, None]}, f"{LIST}.fps", "120"),
    ({"input_reference": {"image_url": "http://127.0.0.1/x.png"}}, "input_reference.image_url", "links"),
    ({"input_reference": {}}, "input_reference.image_url", "missing"),
    ({"model": "echo"}, "model", "no videos endpoint"),
]


@pytest.mark.parametrize(("change", "param", "says"), ROWS)
async def test_a_wrong_field_is_refused_by_name(
    http: aiohttp.ClientSession, broker: Client, change: dict[str, Any], param: str, says: str
) -> None:
    before = attempts(await broker.inspect("status"), "sketch", "frames")
    async with http.post("/v1/videos", json={**FILM, **change}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, param), error
    assert says in error["message"]
    assert attempts(await broker.inspect("status"), "sketch", "frames") == before


async def ask(http: aiohttp.ClientSession, method: str, path: str, **more: Any) -> dict[str, Any]:
    async with http.request(method, path, **more) as response:
        body: dict[str, Any] = await response.json()
        assert response.status == 200, body
        return body


async def job(http: aiohttp.ClientSession, **fields: Any) -> str:
    created = await ask(http, "POST", "/v1/videos", json={**FILM, **fields})
    assert created["status"] == "queued"
    return str(created["id"])


async def becomes(
    http: aiohttp.ClientSession, name: str, status: str, timeout_s: float = 60
) -> dict[str, Any]:
    """Waits for a job."""
    deadline = time.monotonic() + timeout_s
    while (found := await ask(http, "GET", f"/v1/videos/{name}"))["status"] != status:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.01)
    return found


async def content(http: aiohttp.ClientSession, name: str) -> bytes:
    async with http.get(f"/v1/videos/{name}/content") as response:
        data = await response.read()
        assert (response.status, response.content_type) == (200, "video/mp4"), data
        return data


@pytest.fixture
async def clean(http: aiohttp.ClientSession) -> AsyncIterator[None]:
    """Nothing of a job is to stay in the broker."""
    yield
    for found in (await ask(http, "GET", "/v1/videos", params={"limit": "100"}))["data"]:
        await ask(http, "DELETE", f"/v1/videos/{found['id']}")


@pytest.mark.usefixtures("clean")
async def test_a_film_is_what_was_asked(http: aiohttp.ClientSession) -> None:
    name = await job(http, fps=4)
    done = await becomes(http, name, "completed")
    assert (done["progress"], done["size"], done["seconds"], done["seed"]) == (100, "32x16", "1.25", 1)
    assert done["created_at"] <= done["completed_at"] == done["expires_at"] - 1800
    assert (done["object"], done["model"], done["prompt"]) == ("video", "sketch", FILM["prompt"])
    images, fps = played(await content(http, name))
    assert (images.shape, fps) == ((5, 16, 32, 3), 4.0)
    assert (np.diff(images.reshape(5, -1).sum(1)) > 0).all()  # it grows lighter
    assert await content(http, name) == await content(http, name)
    other = await job(http, fps=4, seed=2)
    await becomes(http, other, "completed")
    assert (played(await content(http, other))[0] != images).any()


@pytest.mark.usefixtures("clean")
async def test_seconds_become_frames_that_the_model_can_make(http: aiohttp.ClientSession) -> None:
    for seconds, count in (("1", 9), (2, 17), (0.1, 1)):
        name = await job(http, seconds=seconds, num_frames=None)
        assert (await becomes(http, name, "completed"))["seconds"] == f"{count / 8:g}"
        assert len(played(await content(http, name))[0]) == count
    default = await job(http, num_frames=None, size=None)
    done = await becomes(http, default, "completed")
    assert (done["seconds"], done["size"]) == ("auto", "auto")
    assert played(await content(http, default))[0].shape == (8, 64, 64, 3)


@pytest.mark.usefixtures("clean")
async def test_a_film_can_begin_with_a_picture(http: aiohttp.ClientSession) -> None:
    form = aiohttp.FormData()
    for field, value in FILM.items():
        form.add_field(field, str(value))
    form.add_field("input_reference", file(BLACK), filename="x.png")
    begun = await ask(http, "POST", "/v1/videos", data=form)
    plain = await job(http)
    films = []
    for name in (begun["id"], plain):
        await becomes(http, name, "completed")
        films.append(played(await content(http, name))[0])
    assert films[0][-1].sum() < films[1][-1].sum()  # darker, half of it is black


@pytest.mark.usefixtures("clean")
async def test_progress_shows_and_an_unfinished_film_has_no_content(http: aiohttp.ClientSession) -> None:
    name = await job(http, sampling_params_list=HALF)
    deadline = time.monotonic() + 60
    while (found := await ask(http, "GET", f"/v1/videos/{name}"))["progress"] != 25:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.01)
    assert found["status"] == "in_progress"
    async with http.get(f"/v1/videos/{name}/content") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (409, "not_ready")


async def test_a_film_that_fails_says_why_and_is_forgotten_when_told(
    http: aiohttp.ClientSession, broker: Client
) -> None:
    name = await job(http, sampling_params_list=[None, None, {"raise": "no film in the camera"}, None])
    failed = await becomes(http, name, "failed")
    assert "no film in the camera" in failed["error"]["message"]
    async with http.get(f"/v1/videos/{name}/content") as response:
        assert response.status == 500
    await ask(http, "DELETE", f"/v1/videos/{name}")
    call = name.removeprefix("video_")
    async with asyncio.timeout(60):
        while [one for one in (await broker.letters("list"))["letters"] if one["name"].startswith(call)]:
            await asyncio.sleep(0.01)
    async with http.get(f"/v1/videos/{name}") as response:
        assert response.status == 404


async def test_a_film_that_is_deleted_ends_at_once(http: aiohttp.ClientSession, broker: Client) -> None:
    name = await job(http, sampling_params_list=HALF)
    await becomes(http, name, "in_progress")
    gone = await ask(http, "DELETE", f"/v1/videos/{name}")
    assert gone == {"id": name, "object": "video.deleted", "deleted": True}
    await empty(broker)
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        async with http.request(method, f"/v1/videos/{name}{path}") as response:
            assert response.status == 404


@pytest.mark.usefixtures("clean")
async def test_films_are_listed_page_by_page(http: aiohttp.ClientSession) -> None:
    names = {await job(http) for _ in range(3)}
    async with http.post("/v1/images/generations", json={**DRAW, "store": True}) as response:
        other = response.headers["x-request-id"]
    page = await ask(http, "GET", "/v1/videos", params={"limit": "2", "order": "asc"})
    assert page["has_more"]
    rest = await ask(http, "GET", "/v1/videos", params={"after": page["last_id"], "order": "asc"})
    assert not rest["has_more"]
    listed = [found["id"] for found in page["data"] + rest["data"]]
    assert set(listed) == names
    back = await ask(http, "GET", "/v1/videos")
    assert [found["id"] for found in back["data"]] == listed[::-1]
    for params in ({"limit": "0"}, {"limit": "x"}, {"after": "nothing"}, {"order": "up"}):
        async with http.get("/v1/videos", params=params) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, next(iter(params)))
    async with http.get(f"/v1/videos/video_{other}") as response:
        assert response.status == 404  # it is no film
    await ask(http, "DELETE", f"/v1/requests/{other}")


@pytest.mark.usefixtures("clean")
async def test_a_film_is_a_request_too(http: aiohttp.ClientSession) -> None:
    name = await job(http)
    call = name.removeprefix("video_")
    async with http.get(f"/v1/requests/{call}/result") as response:
        whole = await response.read()
    await becomes(http, name, "completed")
    assert whole == await content(http, name)
    async with http.get(f"/v1/requests/{call}/stream", params={"after": "100"}) as response:
        assert await response.read() == whole[100:]
    assert (await ask(http, "GET", f"/v1/requests/{call}"))["kind"] == "video"


@pytest.mark.filterwarnings("ignore:The Sora API")
@pytest.mark.usefixtures("clean")
async def test_the_official_client_makes_a_film(openai: AsyncOpenAI) -> None:
    made = await openai.videos.create_and_poll(
        model="sketch",
        prompt="a boat",
        seconds="4",
        size="32x16",  # type: ignore[arg-type,unused-ignore]
        input_reference=("x.png", file(BLACK)),
        poll_interval_ms=20,
    )
    assert (made.status, made.progress) == ("completed", 100)
    data = (await openai.videos.download_content(made.id)).read()
    assert played(data)[0].shape == (33, 16, 32, 3)
    assert [found.id async for found in openai.videos.list(limit=1)] == [made.id]
    assert (await openai.videos.delete(made.id)).deleted


@pytest.mark.usefixtures("clean")
async def test_the_pixels_of_a_film_go_when_its_file_is_there(
    http: aiohttp.ClientSession, broker: Client
) -> None:
    large = {"num_frames": 33, "size": "64x32"}
    half = await job(http, **large, sampling_params_list=HALF)
    await reaches(broker, 60.0, blocks=1)  # they are too many to ride inside a message; the file is not
    await ask(http, "DELETE", f"/v1/videos/{half}")
    whole = await job(http, **large)
    await becomes(http, whole, "completed")
    await reaches(broker, 60.0, blocks=0, holds=0)
    assert len(played(await content(http, whole))[0]) == 33


@pytest.mark.usefixtures("clean")
async def test_players_get_the_part_that_they_ask_for(http: aiohttp.ClientSession) -> None:
    name = await job(http)
    await becomes(http, name, "completed")
    whole = await content(http, name)
    size = len(whole)
    for wanted, status, first, end in (
        ("bytes=0-99", 206, 0, 100),
        ("bytes=100-", 206, 100, size),
        ("bytes=-50", 206, size - 50, size),
        (f"bytes=10-{10 * size}", 206, 10, size),
        ("bytes=0-1,5-9", 200, 0, size),
        ("frames=0-1", 200, 0, size),
        (f"bytes={size}-", 416, 0, 0),
    ):
        async with http.get(f"/v1/videos/{name}/content", headers={"Range": wanted}) as response:
            assert (response.status, await response.read()) == (status, whole[first:end]), wanted
            span = {206: f"bytes {first}-{end - 1}/{size}", 416: f"bytes */{size}"}.get(status)
            assert response.headers.get("Content-Range") == span
