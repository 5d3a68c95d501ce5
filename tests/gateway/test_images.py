"""Pictures by HTTP: what is asked arrives, what is refused is named, and the files are what they say.

The pipeline `sketch` draws one colour, which depends on all that was asked.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import pytest
from openai import AsyncOpenAI
from PIL import Image

from broker.client import Client
from tests.gateway.stack import attempts, empty, reaches

DRAW = {"model": "sketch", "prompt": "a red boat"}
LIST = "sampling_params_list[1]"
HANG = [None, {"hang": True}, None, None]

ROWS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "1"),
    ({"prompt": " \n"}, "prompt", "text"),
    ({"prompt": None}, "prompt", "str"),
    ({"prompt": "a" * 32_001}, "prompt", "32000"),
    ({"n": 0}, "n", "from 1 to 4"),
    ({"n": 5}, "n", "from 1 to 4"),
    ({"n": 1000}, "n", "from 1 to 4"),
    ({"n": "two"}, "n", "int"),
    ({"size": "100000x10000"}, "size", "64"),
    ({"size": "1000000x2"}, "size", "WIDTHxHEIGHT"),
    ({"size": "64x64"}, "size", "2048"),
    ({"size": "0x8"}, "size", "from 1 to 64"),
    ({"size": "9x8"}, "size", "multiples of 2"),
    ({"size": "big"}, "size", "WIDTHxHEIGHT"),
    ({"size": 64}, "size", "str"),
    ({"num_inference_steps": 0}, "num_inference_steps", "from 1 to 50"),
    ({"num_inference_steps": -1}, "num_inference_steps", "from 1 to 50"),
    ({"num_inference_steps": 6000}, "num_inference_steps", "from 1 to 50"),
    ({"num_inference_steps": 10**30}, "num_inference_steps", ""),
    ({"num_inference_steps": 2.5}, "num_inference_steps", "int"),
    ({"guidance_scale": -1}, "guidance_scale", "from 0 to 20"),
    ({"guidance_scale": 1001}, "guidance_scale", "from 0 to 20"),
    ({"true_cfg_scale": 21}, "true_cfg_scale", "from 0 to 20"),
    ({"guidance_scale_2": -1}, "guidance_scale_2", "from 0 to 20"),
    ({"guidance_scale": "strong"}, "guidance_scale", "float"),
    ({"negative_prompt": 3}, "negative_prompt", "str"),
    ({"seed": 2**63}, "seed", ""),
    ({"seed": "x"}, "seed", "int"),
    ({"stream": "yes"}, "stream", "bool"),
    ({"partial_images": 2}, "partial_images", "stream"),
    ({"partial_images": 4, "stream": True}, "partial_images", "from 0 to 3"),
    ({"partial_images": -1, "stream": True}, "partial_images", "from 0 to 3"),
    ({"output_format": "gif"}, "output_format", "gif"),
    ({"output_compression": 50}, "output_compression", "jpeg"),
    ({"output_compression": 101, "output_format": "jpeg"}, "output_compression", "100"),
    ({"response_format": "url"}, "response_format", "b64_json"),
    ({"quality": "high"}, "quality", "not supported"),
    ({"style": "vivid"}, "style", "not supported"),
    ({"background": "transparent"}, "background", "not supported"),
    ({"sampling_params_list": [None]}, "sampling_params_list", "4 stages"),
    (
        {"sampling_params_list": [None, {"num_inference_steps": 51}, None, None]},
        f"{LIST}.num_inference_steps",
        "50",
    ),
    ({"sampling_params_list": [None, {"width": 66}, None, None]}, f"{LIST}.width", "64"),
    ({"sampling_params_list": [None, {"width": 64, "height": 64}, None, None]}, f"{LIST}.width", "2048"),
    (
        {"sampling_params_list": [None, {"guidance_scale": "x"}, None, None]},
        f"{LIST}.guidance_scale",
        "float",
    ),
    ({"width": 32}, "width", "WIDTHxHEIGHT"),
    ({"height": 32}, "height", "WIDTHxHEIGHT"),
    ({"num_images_per_prompt": 2}, "num_images_per_prompt", "say n"),
    ({"extra_body": {"seed": 5}}, "extra_body", "at the top"),
    ({"model": "echo"}, "model", "no images endpoint"),
]


@pytest.mark.parametrize(("change", "param", "says"), ROWS)
async def test_a_wrong_field_is_refused_by_name(
    http: aiohttp.ClientSession, broker: Client, change: dict[str, Any], param: str, says: str
) -> None:
    before = attempts(await broker.inspect("status"), "sketch", "picture")
    async with http.post("/v1/images/generations", json={**DRAW, **change}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, param), error
    assert says in error["message"]
    assert attempts(await broker.inspect("status"), "sketch", "picture") == before


async def draw(http: aiohttp.ClientSession, **fields: Any) -> dict[str, Any]:
    async with http.post("/v1/images/generations", json={**DRAW, **fields}) as response:
        body: dict[str, Any] = await response.json()
        assert response.status == 200, body
        return body


def pixels(data: str) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


def colour(body: dict[str, Any], number: int = 0) -> tuple[int, ...]:
    """Of a picture that has one."""
    image = pixels(body["data"][number]["b64_json"])
    assert (image == image[0, 0]).all()
    return tuple(image[0, 0].tolist())


async def test_what_is_asked_arrives(http: aiohttp.ClientSession) -> None:
    rows: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2},
        {"seed": 1, "num_inference_steps": 1},
        {"seed": 1, "guidance_scale": 0},
        {"seed": 1, "guidance_scale": 1.0},
        {"seed": 1, "negative_prompt": ""},
        {"seed": 1, "negative_prompt": "boats"},
        {"seed": 1, "prompt": "a blue boat"},
    ]
    colours = [colour(await draw(http, **row)) for row in rows]
    assert len(set(colours)) == len(rows)
    assert colour(await draw(http, seed=1, size="auto", n=1, user="me", quality="auto")) == colours[0]
    first = await draw(http, size="32x16", seed=1)
    assert pixels(first["data"][0]["b64_json"]).shape == (16, 32, 3)
    assert first["size"] == "32x16"


async def test_each_picture_of_n_is_that_of_its_seed(http: aiohttp.ClientSession) -> None:
    body = await draw(http, n=3, seed=7)
    assert [item["seed"] for item in body["data"]] == [7, 8, 9]
    for number, item in enumerate(body["data"]):
        assert colour(await draw(http, seed=item["seed"])) == colour(body, number)
    text, patches = len(DRAW["prompt"]), 3 * 2 * 2  # 64 x 64 pixels
    assert body["usage"] == {
        "input_tokens": text,
        "output_tokens": patches,
        "total_tokens": text + patches,
        "input_tokens_details": {"text_tokens": text, "image_tokens": 0},
        "output_tokens_details": {"text_tokens": 0, "image_tokens": patches},
    }


async def test_a_seed_that_was_drawn_is_told(http: aiohttp.ClientSession) -> None:
    body, other = await draw(http), await draw(http)
    assert body["data"][0]["seed"] != other["data"][0]["seed"]
    assert colour(await draw(http, seed=body["data"][0]["seed"])) == colour(body)


@pytest.mark.parametrize(
    ("format_", "magic"),
    [("png", b"\x89PNG"), ("jpeg", b"\xff\xd8\xff"), ("webp", b"RIFF"), (None, b"\x89PNG")],
)
async def test_the_format_is_the_one_that_was_asked(
    http: aiohttp.ClientSession, format_: str | None, magic: bytes
) -> None:
    body = await draw(http, output_format=format_, seed=1)
    assert base64.b64decode(body["data"][0]["b64_json"]).startswith(magic)
    assert body["output_format"] == (format_ or "png")


@pytest.mark.parametrize("format_", ["jpeg", "webp"])
async def test_compression_makes_a_file_smaller(http: aiohttp.ClientSession, format_: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    sizes = []
    for quality in (10, 100):
        fields = {"output_format": format_, "output_compression": str(quality), "strength": "0.1"}
        sizes.append(len((await edit(http, noise, **fields))["data"][0]["b64_json"]))
    assert sizes[0] < sizes[1]


# --- edits


def file(image: npt.NDArray[np.uint8], format_: str = "png") -> bytes:
    data = io.BytesIO()
    Image.fromarray(image).save(data, format_)
    return data.getvalue()


async def send(
    http: aiohttp.ClientSession, parts: list[tuple[str, bytes | str]]
) -> tuple[int, dict[str, Any]]:
    form = aiohttp.FormData()
    for name, value in parts:
        form.add_field(name, value, filename="x.png" if isinstance(value, bytes) else None)
    async with http.post("/v1/images/edits", data=form) as response:
        return response.status, await response.json()


async def edit(http: aiohttp.ClientSession, image: npt.NDArray[np.uint8], **fields: str) -> dict[str, Any]:
    status, body = await send(http, [("image", file(image)), *{**DRAW, "seed": "1", **fields}.items()])
    assert status == 200, body
    return body


BLACK = np.zeros((8, 16, 3), np.uint8)


async def test_a_picture_is_changed_where_the_mask_is_transparent(http: aiohttp.ClientSession) -> None:
    new = np.array(colour(await draw(http, seed=1)))
    halves = np.zeros((8, 16, 4), np.uint8)
    halves[:, :8, 3] = 255
    parts: list[tuple[str, bytes | str]] = [*DRAW.items(), ("seed", "1"), ("strength", "1")]
    status, body = await send(http, [*parts, ("image", file(BLACK)), ("mask", file(halves))])
    assert status == 200, body
    image = pixels(body["data"][0]["b64_json"])
    assert not image[:, :8].any()
    assert (image[:, 8:] == new).all()
    white = np.full((8, 16, 3), 255, np.uint8)
    status, body = await send(http, [*parts, ("image[]", file(BLACK)), ("mask", file(white))])
    assert (pixels(body["data"][0]["b64_json"]) == new).all()
    assert body["usage"]["input_tokens_details"]["image_tokens"] == 1


async def test_edits_honour_n_size_and_strength(http: aiohttp.ClientSession) -> None:
    body = await edit(http, BLACK, n="2", size="8x4", strength="0.25")
    assert [item["seed"] for item in body["data"]] == [1, 2]
    first, second = (pixels(item["b64_json"]) for item in body["data"])
    assert first.shape == second.shape == (4, 8, 3)
    assert (first != second).any()
    stronger = await edit(http, BLACK, size="8x4", strength="0.5")
    assert pixels(stronger["data"][0]["b64_json"]).sum() > first.sum()


async def test_a_form_says_a_list_of_objects_as_json(http: aiohttp.ClientSession) -> None:
    weak = await edit(http, BLACK, strength="0.25")
    listed = await edit(http, BLACK, sampling_params_list='[null, {"strength": 0.25}, null, null]')
    assert listed["data"] == weak["data"]


EDIT_ROWS: list[tuple[list[tuple[str, bytes | str]], int, str]] = [
    ([], 400, "image"),
    ([("image", b"no picture")], 400, "image"),
    ([("image", file(BLACK)[:45])], 400, "image"),
    ([("image", b"")], 400, "image"),
    ([("image[]", file(BLACK)), ("image[]", b"x")], 400, "image[1]"),
    ([("image[]", file(BLACK))] * 17, 400, "image"),
    ([("image", file(BLACK)), ("mask", b"x")], 400, "mask"),
    ([("image", file(BLACK)), ("mask", file(BLACK[:4]))], 400, "mask"),
    ([("image", file(BLACK)), ("mask", file(BLACK)), ("mask", file(BLACK))], 400, "mask"),
    ([("image", file(BLACK)), ("strength", "0")], 400, "strength"),
    ([("image", file(BLACK)), ("strength", "1.5")], 400, "strength"),
    ([("image", file(BLACK)), ("guidance_scale", "nan")], 400, "guidance_scale"),
    ([("image", file(BLACK)), ("n", "5")], 400, "n"),
    ([("image", file(BLACK)), ("stream", "true"), ("partial_images", "2")], 400, "partial_images"),
    ([("image", file(BLACK)), ("num_inference_steps", "0")], 400, "num_inference_steps"),
    ([("image", file(BLACK)), ("response_format", "url")], 400, "response_format"),
    ([("image", file(BLACK)), ("prompt", " ")], 400, "prompt"),
    ([("image", file(BLACK)), ("model", "digest")], 400, "model"),
    ([("image", file(BLACK)), ("sampling_params_list", "[{")], 400, "sampling_params_list"),
    ([("image", file(BLACK)), ("sampling_params_list", "3")], 400, "sampling_params_list"),
    ([("image", file(BLACK)), ("sampling_params_list[]", "{}")], 400, "sampling_params_list"),
    (
        [("image", file(BLACK)), ("sampling_params_list", '[null, {"strength": 2}, null, null]')],
        400,
        f"{LIST}.strength",
    ),
    ([("image", bytes(21 << 20))], 413, "image"),
]


@pytest.mark.parametrize(("parts", "status", "param"), EDIT_ROWS)
async def test_an_edit_that_is_wrong_is_refused_by_name(
    http: aiohttp.ClientSession, parts: list[tuple[str, bytes | str]], status: int, param: str
) -> None:
    fields = {**DRAW, **{name: value for name, value in parts if isinstance(value, str)}}
    files = [part for part in parts if isinstance(part[1], bytes)]
    got, body = await send(http, [*fields.items(), *files])
    assert got == status, body
    assert body["error"]["param"] in (param, None if status == 413 else param), body


async def test_an_edit_is_a_form(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/images/edits", json=DRAW) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "image")


# --- streams


async def events(http: aiohttp.ClientSession, **fields: Any) -> list[dict[str, Any]]:
    async with http.post("/v1/images/generations", json={**DRAW, "stream": True, **fields}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        body = (await response.read()).decode()
    return [json.loads(block.removeprefix("data: ")) for block in body.split("\n\n")[:-1]]


@pytest.mark.parametrize("partial", [0, 1, 3])
async def test_a_stream_has_the_partial_pictures_and_then_the_whole(
    http: aiohttp.ClientSession, partial: int
) -> None:
    *before, last = await events(http, partial_images=partial, seed=5)
    assert [event["type"] for event in before] == ["image_generation.partial_image"] * partial
    assert [event["partial_image_index"] for event in before] == list(range(partial))
    assert last["type"] == "image_generation.completed"
    assert last["usage"]["output_tokens"] == 4
    assert (
        pixels(last["b64_json"]).tolist()
        == pixels((await draw(http, seed=5))["data"][0]["b64_json"]).tolist()
    )
    darker = [int(pixels(event["b64_json"]).sum()) for event in (*before, last)]
    assert darker == sorted(darker)


async def test_a_stream_of_several_tells_them_apart_and_counts_once(http: aiohttp.ClientSession) -> None:
    got = await events(http, n=2, seed=5, partial_images=1)
    completed = {event["index"]: event for event in got if event["type"].endswith("completed")}
    assert sorted(completed) == [0, 1]
    assert [completed[number]["seed"] for number in (0, 1)] == [5, 6]
    whole = await draw(http, n=2, seed=5)
    assert (
        sum(event["usage"]["total_tokens"] for event in completed.values()) == whole["usage"]["total_tokens"]
    )
    for number, event in completed.items():
        assert event["b64_json"] == whole["data"][number]["b64_json"]


async def test_a_failure_in_a_stream_is_an_error_event(http: aiohttp.ClientSession) -> None:
    breaks = [None, {"raise": "paint ran out", "at": 1}, None, None]
    first, error = await events(http, partial_images=1, sampling_params_list=breaks)
    assert first["type"] == "image_generation.partial_image"
    assert "paint ran out" in error["error"]["message"]
    async with http.post("/v1/images/generations", json={**DRAW, "sampling_params_list": breaks}) as response:
        assert response.status == 200  # without partial pictures there is no second chunk


async def test_who_leaves_takes_all_pictures_along(http: aiohttp.ClientSession, broker: Client) -> None:
    body = {**DRAW, "n": 3, "sampling_params_list": HANG}
    asking = asyncio.create_task(http.post("/v1/images/generations", json=body).__aenter__())
    await reaches(broker, 60.0, running=3)
    asking.cancel()
    await empty(broker)


async def test_pictures_that_are_stored_can_be_fetched_again(http: aiohttp.ClientSession) -> None:
    body = {**DRAW, "n": 2, "seed": 3, "store": True, "stream": True, "partial_images": 1}
    async with http.post("/v1/images/generations", json=body) as response:
        call = response.headers["x-request-id"]
        await response.read()
    async with http.get(f"/v1/requests/{call}/result") as response:
        again = await response.json()
    async with http.get(f"/v1/requests/{call}/stream", params={"after": "2.1"}) as response:
        rest = (await response.read()).decode()
    assert again["data"] == (await draw(http, n=2, seed=3))["data"]
    assert rest.count("data: ") == 1
    assert '"index":1' in rest
    async with http.delete(f"/v1/requests/{call}") as response:
        assert response.status == 200


# --- the official client


async def test_the_official_client_generates(openai: AsyncOpenAI) -> None:
    answer = await openai.images.generate(
        model="sketch",
        prompt="a boat",
        n=2,
        size="32x16",  # type: ignore[arg-type,unused-ignore]
        output_format="webp",
        extra_body={"seed": 1, "num_inference_steps": 2},
    )
    assert answer.data is not None
    assert len(answer.data) == 2
    assert answer.usage is not None
    assert pixels(answer.data[0].b64_json or "").shape == (16, 32, 3)


async def test_the_official_client_streams(openai: AsyncOpenAI) -> None:
    stream = await openai.images.generate(model="sketch", prompt="a boat", stream=True, partial_images=2)
    kinds = [event.type async for event in stream]
    assert kinds == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]


async def test_the_official_client_edits(openai: AsyncOpenAI) -> None:
    files: list[Any] = [("a.png", file(BLACK)), ("b.png", file(BLACK))]
    answer = await openai.images.edit(model="sketch", prompt="brighter", image=files, n=2)
    assert answer.data is not None
    assert pixels(answer.data[1].b64_json or "").any()
    stream = await openai.images.edit(
        model="sketch", prompt="brighter", image=files[0], mask=files[1], stream=True, partial_images=1
    )
    kinds = [event.type async for event in stream]
    assert kinds == ["image_edit.partial_image", "image_edit.completed"]


async def test_the_first_picture_is_timed(http: aiohttp.ClientSession) -> None:
    await draw(http)
    async with http.get("/metrics") as response:
        assert 'omni_time_to_first_image_seconds_count{pipeline="sketch"}' in await response.text()
