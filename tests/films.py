"""Films as players see them."""

from __future__ import annotations

import io

import av
import numpy as np
import numpy.typing as npt


def played(file: bytes) -> tuple[npt.NDArray[np.uint8], float]:
    """A film's frames [frames, height, width, 3], and how many there are a second."""
    with av.open(io.BytesIO(file)) as film:
        images = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
        return np.stack(images), float(film.streams.video[0].average_rate or 0)
