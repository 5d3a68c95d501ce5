"""Pictures that callers upload: RGB and upright whatever the file holds, or refused by name."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from broker.gateway import pictures
from broker.gateway.errors import ApiError

FIELD = "messages[0].content[1].image_url.url"
RNG = np.random.default_rng(7)
JUNK = RNG.bytes(4_000)
NOISE = RNG.integers(0, 256, (37, 23, 3), np.uint8)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    sink = io.BytesIO()
    image.save(sink, kind, **options)
    return sink.getvalue()


def png(array: np.ndarray) -> bytes:
    return saved(Image.fromarray(array))


async def seen(data: bytes, max_mp: float = 1.0, *, low: bool = False) -> np.ndarray:
    rgb = await pictures.decode(data, FIELD, max_mp=max_mp, low=low)
    assert rgb.dtype == np.uint8
    assert rgb.flags.c_contiguous
    return rgb


async def refused(data: bytes, status: int = 400, max_mp: float = 1.0) -> str:
    with pytest.raises(ApiError) as caught:
        await pictures.decode(data, FIELD, max_mp=max_mp)
    assert (caught.value.status, caught.value.param) == (status, FIELD)
    assert len(caught.value.message) < 300
    return caught.value.message


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP"])
async def test_lossless_files_keep_every_pixel(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    np.testing.assert_array_equal(await seen(saved(Image.fromarray(NOISE), kind, **options)), NOISE)


async def test_a_jpeg_is_what_pillow_makes_of_it() -> None:
    """As the models' own processors do: another decoder would round otherwise."""
    data = saved(Image.fromarray(NOISE), "JPEG", quality=90)
    np.testing.assert_array_equal(await seen(data), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1)])
async def test_a_picture_may_be_one_pixel_wide(shape: tuple[int, int]) -> None:
    assert (await seen(png(np.zeros((*shape, 3), np.uint8)))).shape == (*shape, 3)


async def test_every_mode_becomes_rgb() -> None:
    grey = NOISE[:, :, 0]
    np.testing.assert_array_equal(await seen(png(grey)), np.repeat(grey[:, :, None], 3, axis=2))
    black_and_white = Image.fromarray(grey).convert("1")
    assert set(np.unique(await seen(saved(black_and_white)))) == {0, 255}
    palette = Image.fromarray(NOISE).quantize(16)
    np.testing.assert_array_equal(await seen(saved(palette)), np.asarray(palette.convert("RGB")))
    cmyk = saved(Image.fromarray(NOISE).convert("CMYK"), "JPEG")
    assert (await seen(cmyk)).shape == NOISE.shape


async def test_sixteen_bits_become_eight_by_value() -> None:
    deep = np.array([[0, 128, 257, 32_768, 65_535]], np.uint16)
    assert (await seen(png(deep)))[0, :, 0].tolist() == [0, 0, 1, 128, 255]


async def test_what_is_transparent_lies_on_white() -> None:
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 3] = 0, 128, 255
    assert (await seen(png(rgba)))[0, :, 0].tolist() == [255, 127, 0]
    la = np.zeros((1, 2, 2), np.uint8)
    la[0, :, 1] = 0, 255
    assert (await seen(saved(Image.fromarray(la, "LA"))))[0, :, 0].tolist() == [255, 0]
    palette = Image.new("P", (1, 1))
    palette.putpalette([10, 20, 30])
    assert (await seen(saved(palette, transparency=0)))[0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
async def test_a_camera_that_was_turned(orientation: int) -> None:
    upright = np.zeros((8, 16, 3), np.uint8)
    upright[:4, :8] = 255  # top left
    turned = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright, 1),
        7: upright.swapaxes(0, 1)[::-1, ::-1],
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.fromarray(np.ascontiguousarray(turned)), exif=exif)
    np.testing.assert_array_equal(await seen(data), upright)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
async def test_of_a_moving_picture_the_first_counts(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert (await seen(data))[0, 0].tolist() == [255, 0, 0]


async def test_a_low_level_of_detail_shrinks() -> None:
    wide = png(np.zeros((300, 900, 3), np.uint8))
    assert (await seen(wide, low=True)).shape == (171, 512, 3)
    assert (await seen(wide)).shape == (300, 900, 3)
    assert (await seen(png(NOISE), low=True)).shape == NOISE.shape


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def claims(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG of that size, as its header says."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


JPEG = saved(Image.fromarray(NOISE), "JPEG")

HOSTILE = {
    "empty": b"",
    "random": JUNK[:64],
    "text": b"hello, this is no picture at all",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n",
    "pdf": b"%PDF-1.4\n",
    "tiff": b"II*\0\x08\0\0\0",
    "icon": b"\0\0\1\0\1\0",
    "a wav": b"RIFF\x24\0\0\0WAVEfmt ",
    "a jpeg less its last 128 bytes": JPEG[:-128],
    "a jpeg less its second half": JPEG[: len(JPEG) // 2],
    "a png less its second half": png(NOISE)[: len(png(NOISE)) // 2],
    "a png's magic, then noise": b"\x89PNG\r\n\x1a\n" + JUNK,
    "a jpeg's magic, then noise": b"\xff\xd8\xff" + JUNK,
    "a gif's magic, then noise": b"GIF89a\x08\0\x08\0" + JUNK,
    "a webp's magic, then noise": b"RIFF\x00\x10\0\0WEBP" + JUNK,
    "a bitmap's magic, then noise": b"BM" + JUNK,
    "a png without pixels": claims(8, 8),
    "a png of no width": claims(0, 8, zlib.compress(b"")),
    "a png with a bad checksum": png(NOISE)[:30] + b"x" + png(NOISE)[31:],
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_files_are_refused(name: str) -> None:
    assert "0x" not in await refused(HOSTILE[name])


@pytest.mark.parametrize(
    ("width", "height"), [(1001, 1000), (20_000, 20_000), (2**31 - 1, 1), (2**30, 2**30)]
)
async def test_a_size_beyond_the_limit_is_refused_by_the_header(width: int, height: int) -> None:
    assert "pixels" in await refused(claims(width, height), 413)


async def test_the_limit_itself_is_allowed() -> None:
    assert (await seen(png(np.zeros((1000, 1000, 3), np.uint8)))).shape == (1000, 1000, 3)


_BOMB = """
import asyncio, resource, sys
from broker.gateway import pictures
from broker.gateway.errors import ApiError

async def main():
    small, *bombs = (open(path, "rb").read() for path in sys.argv[1:])
    await pictures.decode(small, "f", max_mp=1)  # libraries are loaded
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for bomb in bombs:
        try:
            await pictures.decode(bomb, "f", max_mp=1)
        except ApiError as error:
            print(error.status)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

asyncio.run(main())
"""


def test_decompression_bombs_cost_their_header(tmp_path: Path) -> None:
    """Small files that claim 12,000 x 12,000 pixels: 400 MB of them decoded."""
    edge = 12_000
    webp = saved(Image.fromarray(NOISE), "WEBP", lossless=True)
    size = webp.index(b"VP8L") + 9  # two numbers of 14 bits, each less 1
    gif = saved(Image.fromarray(NOISE), "GIF")
    files = {
        "small.png": png(NOISE),
        "bomb.png": claims(edge, edge, zlib.compress(bytes(edge * 300))),
        "bomb.webp": webp[:size] + struct.pack("<I", (edge - 1) * (1 + 2**14)) + webp[size + 4 :],
        "bomb.gif": gif[:6] + struct.pack("<HH", edge, edge) + gif[10:],
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-P", "-c", _BOMB, *(str(tmp_path / name) for name in files)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    *statuses, grown_kb = map(int, result.stdout.split())
    assert statuses == [413, 413, 413]
    assert grown_kb < 20_000
