"""Pixels to files: pictures as PNG, JPEG or WebP. In a thread, since it takes a processor."""

from __future__ import annotations

import base64
import io
from functools import partial
from threading import Event
from typing import Any, Literal, NamedTuple

import numpy as np

from adapters.chunk import Payload
from broker.gateway.errors import ApiError
from broker.gateway.pictures import Rgb
from broker.gateway.uploads import in_thread

Format = Literal["png", "jpeg", "webp"]

#: How each is written. PNG: a third of the time of Pillow's own level, and a few percent larger.
_HOW: dict[str, dict[str, Any]] = {"png": {"compress_level": 3}, "jpeg": {"subsampling": 0}, "webp": {}}


class Print(NamedTuple):
    """A picture as a file."""

    data: str  #: base64
    width: int
    height: int

    @property
    def size(self) -> str:
        """As the API says it."""
        return f"{self.width}x{self.height}"


async def picture(payload: Payload, format_: Format, quality: int) -> Print:
    """Encodes ``{"image": uint8 [height, width, 3]}``.

    Args:
        payload: From the pipeline.
        format_: Of the file.
        quality: 0 to 100, of JPEG and WebP.

    Raises ApiError (500) for a payload without a picture in it.
    """
    image = pixels(payload)
    data = await in_thread(partial(_base64, image, format_, quality))
    return Print(data, image.shape[1], image.shape[0])


def _base64(image: Rgb, format_: str, quality: int, _: Event) -> str:
    return base64.b64encode(encode(image, format_, quality)).decode("ascii")


def encode(image: Rgb, format_: str, quality: int) -> bytes:
    """A picture as a file, see :func:`picture`."""
    from PIL import Image

    file = io.BytesIO()
    how = _HOW[format_] if format_ == "png" else {**_HOW[format_], "quality": quality}
    Image.fromarray(image).save(file, format_, **how)
    return file.getvalue()


def pixels(payload: Payload) -> Rgb:
    """A payload's picture. Raises ApiError (500) for anything but pixels."""
    image = payload.get("image")
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3:
        raise _bad("the pipeline gave no image of 8 bit pixels")
    if image.shape[2] != 3 or 0 in image.shape:
        raise _bad(f"the pipeline's image has the shape {image.shape}")
    return image


def _bad(problem: str) -> ApiError:
    return ApiError(problem, status=500, code="bad_output")
