"""Finding NaN and infinity at a stage border, where the stage can still be named."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from adapters import tensor
from adapters.paths import ROOT, children


def find_nonfinite(payload: dict[str, Any]) -> str | None:
    """The path of the first float, or float tensor, that holds NaN or infinity; None when all is well.

    Complex tensors count too. Tensors that can't travel anyway are left to :func:`adapters.chunk.pack`.
    """
    return _find(payload, ROOT)


def _find(value: Any, path: str) -> str | None:
    if isinstance(value, str | int | bytes) or value is None:
        return None
    if isinstance(value, float | np.floating):
        return None if math.isfinite(value) else path
    if tensor.is_tensor(value):
        return None if _finite(value) else path
    for step, child in children(value):
        if (found := _find(child, path + step)) is not None:
            return found
    return None


def _finite(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return _finite_array(value)
    torch = sys.modules["torch"]
    if not value.is_floating_point() and not value.is_complex():
        return True
    if value.layout is not torch.strided or value.is_quantized or not value.numel():
        return True
    # The 8-bit floats have no isfinite of their own, and float32 holds every value of the short ones.
    value = value.detach()
    return bool(torch.isfinite(value.float() if value.element_size() < 4 else value).all())


def _finite_array(array: np.ndarray[Any, Any]) -> bool:
    if array.dtype.kind not in "fc" or not array.size:
        return True
    if array.dtype.kind == "c" or isinstance(array, np.ma.MaskedArray):
        return bool(np.isfinite(array).all())
    # NaN passes through min and max, which need no temporary array as isfinite does.
    return math.isfinite(array.min()) and math.isfinite(array.max())
