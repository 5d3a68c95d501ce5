"""Pixels to files: pictures as PNG, JPEG or WebP, films as MP4. In a thread, since it takes a processor."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from fractions import Fraction
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


_films = asyncio.Semaphore(1)  # its encoder has threads of its own


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
    image = pixels(payload, "image", 3)
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


async def film(payloads: Sequence[Payload]) -> bytes:
    """Encodes ``{"frames": uint8 [frames, height, width, 3], "fps": frames a second}``, one after the other.

    Raises ApiError (500) for payloads without a film in them.
    """
    frames = [pixels(payload, "frames", 4) for payload in payloads]
    if not sum(map(len, frames)):
        raise _bad("the pipeline gave no film")
    return await in_thread(partial(_film, frames, float(payloads[0].get("fps", 0))), _films)


def _film(parts: Sequence[Rgb], fps: float, stop: Event) -> bytes:
    """H.264 in MP4, its index first, so that a player may begin before it has everything."""
    import av

    if not fps > 0:
        raise _bad("the pipeline's film has no fps")
    file = io.BytesIO()
    index = str(4096 + 64 * sum(map(len, parts)))  # bytes kept free for it; it takes about half of that
    with av.open(file, "w", format="mp4", options={"moov_size": index}) as container:
        rate = Fraction(fps).limit_denominator(1001)
        stream = container.add_stream("libx264", rate=rate, options={"crf": "18", "preset": "veryfast"})
        height, width = parts[0].shape[1:3]
        # Colour is kept at half the resolution, so edges are even.
        stream.height, stream.width, stream.pix_fmt = height + height % 2, width + width % 2, "yuv420p"
        for part in parts:
            for frame in part:
                if stop.is_set():
                    return b""
                even = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
                container.mux(stream.encode(av.VideoFrame.from_ndarray(even, "rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def pixels(payload: Payload, field: str, axes: int) -> Rgb:
    """The field ``image`` or ``frames`` of a payload. Raises ApiError (500) for anything but pixels."""
    array = payload.get(field)
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != axes:
        raise _bad(f"the pipeline gave no {field} of 8 bit pixels")
    if array.shape[-1] != 3 or 0 in array.shape[-3:]:
        raise _bad(f"the pipeline's {field} have the shape {array.shape}")
    return array


def _bad(problem: str) -> ApiError:
    return ApiError(problem, status=500, code="bad_output")
