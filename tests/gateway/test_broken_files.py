"""Files that are broken at random places are read as far as they can be, or refused; never anything else."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from PIL import Image

from broker.gateway import films, media, pictures
from broker.gateway.errors import ApiError
from broker.gateway.uploads import Pixels
from tests.gateway.test_films import BOUNDS, KINDS, film
from tests.gateway.test_pictures import NOISE, saved
from tests.gateway.test_uploads import file, tone

ROUNDS = 40  #: of each kind; the slowest takes a second
Decode = Callable[[bytes], Awaitable[Any]]


def broken(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, cut out or put in; the first eight stay, so that the kind is still told."""
    mutable = bytearray(data)
    for _ in range(draw.choice((1, 2, 5, 20))):
        at, how = draw.randrange(8, len(mutable)), draw.random()
        if how < 0.6:
            mutable[at] = draw.randrange(256)
        elif how < 0.8:
            del mutable[at : min(at + draw.randrange(1, 50), len(mutable) - 1)]
        else:
            mutable[at:at] = draw.randbytes(draw.randrange(1, 20))
    return bytes(mutable)


async def survives(data: bytes, decode: Decode) -> None:
    draw = random.Random(5)
    refused: set[tuple[int, str | None]] = set()
    for _ in range(ROUNDS):
        try:
            await decode(broken(data, draw))
        except ApiError as error:
            refused.add((error.status, error.param))
    assert refused <= {(400, "file"), (413, "file")}


@pytest.mark.parametrize("kind", pictures.FORMATS)
async def test_broken_pictures(kind: str) -> None:
    await survives(saved(Image.fromarray(NOISE), kind), lambda data: pictures.decode(data, "file", max_mp=1))


@pytest.mark.parametrize("kind", KINDS)
async def test_broken_films(kind: str) -> None:
    await survives(film(kind=kind), lambda data: films.decode(data, "file", BOUNDS, pixels=Pixels(10)))


async def test_broken_films_with_sound() -> None:
    await survives(
        film(kind="webm", sound=tone(2.0, 48_000)),
        lambda data: films.decode(data, "file", BOUNDS, pixels=Pixels(10), sound_s=5),
    )


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "opus", "aac"])
async def test_broken_clips(kind: str) -> None:
    await survives(await file(kind), lambda data: media.decode(data, "file", max_s=5))
