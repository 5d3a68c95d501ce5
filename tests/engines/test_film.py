"""Engine ``film``: frames to a file."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from adapters.chunk import Payload
from tests.engines.helpers import collect, job, stage
from tests.films import played
from workers.engine import ItemError
from workers.engines.film import FilmEngine


async def made(*payloads: Payload) -> bytes:
    engine = FilmEngine(stage("film"), device="cpu")
    await engine.start()
    (payload,) = await collect(engine, job(*payloads))
    return bytes(payload["mp4"])


def frames(count: int, height: int = 16, width: int = 32, level: int = 100) -> np.ndarray:
    return np.full((count, height, width, 3), level, np.uint8)


async def test_a_film_has_all_frames_in_order_and_what_is_partial_is_left_out() -> None:
    early = {"frames": frames(3, level=0), "fps": 10, "partial": 0}
    file = await made(
        early, {"frames": frames(2), "fps": 12.5}, {"frames": frames(3, level=200), "fps": 12.5}
    )
    images, fps = played(file)
    assert (images.shape, fps) == ((5, 16, 32, 3), 12.5)
    assert np.abs(images.astype(int) - np.array([100, 100, 200, 200, 200])[:, None, None, None]).max() < 4
    assert file.index(b"moov") < file.index(b"mdat"), "a player must wait for the end"


async def test_odd_edges_get_a_row_more() -> None:
    images, _ = played(await made({"frames": frames(2, 15, 31), "fps": 8}))
    assert images.shape == (2, 16, 32, 3)


async def test_another_attempt_makes_the_same_file() -> None:
    payload = {"frames": np.random.default_rng(1).integers(0, 256, (9, 64, 64, 3), np.uint8), "fps": 8}
    assert await made(payload) == await made(payload)


GOOD: Payload = {"frames": frames(1), "fps": 8}


@pytest.mark.parametrize(
    ("payloads", "says"),
    [
        ([], "no film"),
        ([{"fps": 8}], "no frames"),
        ([{"frames": frames(1).astype(np.float32), "fps": 8}], "8 bit"),
        ([{"frames": frames(1)[0], "fps": 8}], "8 bit"),
        ([{"frames": frames(0), "fps": 8}], "shape"),
        ([{"frames": frames(1)[..., :2], "fps": 8}], "shape"),
        ([GOOD, {"frames": frames(1, 8), "fps": 8}], "several sizes"),
        ([{"frames": frames(1)}], "fps"),
        ([{"frames": frames(1), "fps": 0}], "fps"),
        ([{"frames": frames(1), "fps": float("nan")}], "fps"),
    ],
)
async def test_what_is_no_film_fails_alone(payloads: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ItemError, match=says):
        await made(*payloads)


async def test_a_job_that_is_cancelled_stops_the_encoder() -> None:
    engine = FilmEngine(stage("film"), device="cpu")
    await engine.start()
    long = {"frames": np.broadcast_to(frames(1, 512, 512), (2000, 512, 512, 3)), "fps": 8}
    task = asyncio.create_task(collect(engine, job(long)))
    while not engine._slots.locked():
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (payload,) = await collect(engine, job(GOOD))
    assert len(played(bytes(payload["mp4"]))[0]) == 1
