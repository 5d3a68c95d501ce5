"""Pictures and videos that a Python caller has, as the pipelines take them: uint8 RGB."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Rgb = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Video:
    """Frames of a video, and its own sound where that is to be heard with them.

    Attributes:
        frames: uint8 [frames, height, width, 3].
        fps: Frames a second, of these.
        sound: Mono, 16 kHz, in [-1, 1].
    """

    frames: Rgb
    fps: float
    sound: npt.NDArray[np.float32] | None = None


def picture(pixels: Any) -> Rgb:
    """A picture, from an array or anything that NumPy makes one of (Pillow's images too).

    Raises ValueError for anything but uint8 [height, width, 3].
    """
    return _rgb(pixels, 3, "a picture must be uint8 [height, width, 3]")


def video(frames: Any, fps: float) -> Video:
    """A video, from its frames: so many a second as should be looked at, two say.

    Raises ValueError for anything but uint8 [frames, height, width, 3], and for a rate that is none.
    """
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"a video's frames a second must be above 0, got {fps}")
    return Video(_rgb(frames, 4, "a video must be uint8 [frames, height, width, 3]"), float(fps))


def _rgb(pixels: Any, axes: int, expected: str) -> Rgb:
    array = np.asarray(pixels)
    if array.dtype != np.uint8 or array.ndim != axes or array.shape[-1] != 3 or not array.size:
        raise ValueError(f"{expected}, got {array.dtype} {list(array.shape)}")
    return np.ascontiguousarray(array)
