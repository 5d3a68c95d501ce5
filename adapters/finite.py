"""Finding NaN and infinity at a stage border, where the stage can still be named."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from adapters import tensor
from adapters.paths import ROOT, children

_HARMLESS = frozenset({str, int, bool, bytes, type(None)})


def find_nonfinite(payload: dict[str, Any]) -> str | None:
    """The path of the first float, or float tensor, that holds NaN or infinity; None when all is well.

    Complex tensors count too. Tensors that can't travel anyway are left to :func:`adapters.chunk.pack`.
    """
    return _find(payload, ROOT) if _bad(payload) else None


def _find(value: Any, path: str) -> str:
    for step, child in children(value):
        if _bad(child):
            return _find(child, path + step)
    return path


def _bad(value: Any) -> bool:
    """Whether there is anything non-finite in a value. Builds no paths: nearly always there is not."""
    if type(value) in _HARMLESS:
        return False
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return _bad_leaf(value)
    for child in value:  # noqa: SIM110  any() takes twice as long, and this runs for every chunk
        if type(child) not in _HARMLESS and _bad(child):
            return True
    return False


def _bad_leaf(value: Any) -> bool:
    if isinstance(value, float | np.floating):
        return not math.isfinite(value)
    if isinstance(value, np.ndarray):
        return not _finite_array(value)
    return tensor.is_tensor(value) and not _finite_torch(value)


def _finite_torch(value: Any) -> bool:
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
