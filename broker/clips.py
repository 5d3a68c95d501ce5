"""Samples that a Python caller has, as the pipelines take them: mono float32 at 16 kHz."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

RATE = 16_000  #: Hz


def clip(samples: npt.ArrayLike, rate: int = RATE) -> npt.NDArray[np.float32]:
    """Converts a recording.

    Args:
        samples: 1-D, floats in [-1, 1] or int16.
        rate: Their rate in Hz; others than 16 kHz are resampled.

    Raises ValueError for another shape or type, for an empty recording, and for NaN or infinity in it.
    """
    array = np.asarray(samples)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"audio must be one-dimensional and not empty, got shape {array.shape}")
    if array.dtype == np.int16:
        array = array.astype(np.float32) / 32768.0
    if array.dtype.kind != "f":
        raise ValueError(f"audio must be floats in [-1, 1] or int16, got {array.dtype}")
    if rate <= 0:
        raise ValueError(f"the rate must be positive, got {rate}")
    mono = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(mono).all():
        raise ValueError("audio holds NaN or infinity")
    return mono if rate == RATE else _resampled(mono, rate)


def _resampled(mono: npt.NDArray[np.float32], rate: int) -> npt.NDArray[np.float32]:
    import av

    frame: Any = av.AudioFrame.from_ndarray(mono[None, :], format="flt", layout="mono")
    frame.sample_rate = rate
    resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
    frames: list[Any] = [*resampler.resample(frame), *resampler.resample(None)]
    samples: npt.NDArray[np.float32] = np.concatenate([piece.to_ndarray().ravel() for piece in frames])
    return samples
