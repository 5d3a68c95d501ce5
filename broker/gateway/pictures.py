"""Uploaded pictures to pixels: RGB, upright, within bounds that are checked before anything is decoded.

The format is told from the file's first bytes and only that one is tried. The rules for pixels are those of
the processors that models' makers publish: what is transparent lies on white, palettes, greys and CMYK become
RGB, and 16 bits become 8. Of a file with several pictures the first counts.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from broker.gateway.errors import ApiError
from broker.gateway.uploads import in_thread

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Rgb = npt.NDArray[np.uint8]  #: [height, width, 3]
Mask = npt.NDArray[np.uint8]  #: [height, width]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
LOW = 512  #: pixels of the longer edge at most, where the caller asks for a low level of detail

_MAGIC = ((b"\x89PNG\r\n\x1a\n", "PNG"), (b"\xff\xd8\xff", "JPEG"), (b"GIF8", "GIF"), (b"BM", "BMP"))


async def decode(data: bytes, field: str, *, max_mp: float, low: bool = False) -> Rgb:
    """Decodes a file to uint8 RGB, in a thread.

    Args:
        data: The file.
        field: Its place in the request, for errors.
        max_mp: Megapixels; a larger picture is refused before it is decoded.
        low: Shrink it into a square of :data:`LOW` pixels.

    Raises:
        ApiError: 400 for what is no picture, or cut; 413 for one that is too large.
    """
    return await in_thread(
        partial(_decode, data, _kind(data, field), field, max_mp, _shrunk if low else _rgb)
    )


async def decode_mask(data: bytes, field: str, *, max_mp: float) -> Mask:
    """Decodes a file that says which part of a picture is to be made anew: uint8, 255 there, 0 elsewhere.

    It is where the file is transparent. One without transparency says it with white.
    Arguments and errors are those of :func:`decode`.
    """
    return await in_thread(partial(_decode, data, _kind(data, field), field, max_mp, _mask))


def _kind(data: bytes, field: str) -> str:
    kind = sniff(data)
    if kind is None:
        raise ApiError(
            f"{field}: not a picture; accepted are {', '.join(FORMATS)}", field, code="invalid_image"
        )
    return kind


def sniff(data: bytes) -> str | None:
    """Pillow's name of a file's format, from its first bytes; None for anything unknown."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((name for magic, name in _MAGIC if data.startswith(magic)), None)


def _decode(
    data: bytes, kind: str, field: str, max_mp: float, pixels: Callable[[Picture], Rgb], _: Event
) -> Rgb:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=(kind,)) as image:  # reads the header alone
            size = image.size
            if image.width * image.height <= max_mp * 1e6:
                image.load()
                return pixels(ImageOps.exif_transpose(image))
    except Image.DecompressionBombError:  # Pillow's own bound
        raise ApiError(
            f"{field}: a picture of far too many pixels", field, status=413, code="image_too_large"
        ) from None
    except UnidentifiedImageError:  # its own words show an address
        raise ApiError(
            f"{field}: can't be decoded: its header is broken", field, code="invalid_image"
        ) from None
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise ApiError(f"{field}: can't be decoded: {error}", field, code="invalid_image") from None
    raise ApiError(
        f"{field}: {size[0]} x {size[1]} pixels; at most {max_mp:g} megapixels are allowed",
        field,
        status=413,
        code="image_too_large",
    )


def _rgb(image: Picture) -> Rgb:
    return np.array(_to_rgb(image))


def _shrunk(image: Picture) -> Rgb:
    from PIL import Image

    rgb = _to_rgb(image)
    rgb.thumbnail((LOW, LOW), Image.Resampling.LANCZOS)
    return np.array(rgb)


def _mask(image: Picture) -> Mask:
    if image.has_transparency_data:
        return 255 - np.array(image.convert("RGBA").getchannel("A"))
    return np.array(_to_rgb(image).convert("L"))


def _to_rgb(image: Picture) -> Picture:
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bit grey, whose conversion in Pillow cuts what is above 255
        grey = np.clip(np.asarray(image), 0, 65_535).astype(np.uint32)
        image = Image.fromarray(((grey * 255 + 32_767) // 65_535).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
