"""The tensor codec: what a tensor is made of, and how it is made again from bytes.

NumPy arrays and torch tensors on the CPU are both accepted. torch is never imported to *send*: a torch
tensor can only exist where torch is already loaded. It is imported to *receive* the dtypes that NumPy lacks
(bfloat16 and the 8-bit floats).
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from adapters.handle import BadHandle, UnsupportedTensor

Array = npt.NDArray[Any]

MAX_DIMENSIONS = 32  #: what every NumPy can hold

_NATIVE: dict[str, np.dtype[Any]] = {
    np.dtype(code).name: np.dtype(code)
    for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
}
#: dtypes that only torch has -> the NumPy dtype that carries their bits
_TORCH_ONLY: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.int16),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
}
_STORAGE = _NATIVE | _TORCH_ONLY
_NAMES = {kind: name for name, kind in _NATIVE.items()}  # dtype.name is slow


class Plain(NamedTuple):
    """A tensor as NumPy sees it: ``array`` holds its bits with any strides, ``dtype`` is torch's name."""

    array: Array
    dtype: str


def contiguous(array: Array) -> memoryview:
    """The array's bytes in C order: its own memory if it lies so, else a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def is_tensor(value: object) -> bool:
    """Whether a value is an array or tensor of any kind, supported or not."""
    return isinstance(value, np.ndarray) or _is_torch(value)


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    # A half-imported torch (another thread is importing it) has no Tensor yet, so nobody holds one.
    kind = getattr(torch, "Tensor", None)
    return kind is not None and isinstance(value, kind)


def plain(tensor: object) -> Plain:
    """Looks at a tensor as a NumPy array over the same memory, without copying.

    Raises :class:`UnsupportedTensor` for anything whose bits a (dtype, shape, bytes) triple can't carry.
    """
    if isinstance(tensor, np.ndarray):
        return _plain_numpy(tensor)
    if _is_torch(tensor):
        return _plain_torch(tensor)
    raise UnsupportedTensor(f"{type(tensor).__name__} is no NumPy array and no torch tensor")


def _plain_numpy(array: Array) -> Plain:
    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedTensor("masked arrays can't be carried: their mask would be lost")
    if not array.dtype.isnative:
        raise UnsupportedTensor(f"dtype {array.dtype.str} has foreign byte order; convert it first")
    name = _NAMES.get(array.dtype)
    if name is None:
        raise UnsupportedTensor(f"dtype {array.dtype} can't be carried; allowed: {', '.join(_NATIVE)}")
    return _checked(array, name)


def _plain_torch(tensor: Any) -> Plain:
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise UnsupportedTensor(f"{tensor.layout} tensors can't be carried; send its parts as dense tensors")
    if tensor.is_quantized:
        raise UnsupportedTensor("quantised tensors can't be carried; send values, scales and zero points")
    if tensor.device.type != "cpu":
        raise UnsupportedTensor(f"a tensor on {tensor.device} can't be carried; copy it to the CPU first")
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _STORAGE:
        raise UnsupportedTensor(f"dtype {name} can't be carried; allowed: {', '.join(_STORAGE)}")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if name in _TORCH_ONLY:
        tensor = tensor.view(getattr(torch, _TORCH_ONLY[name].name))
    return _checked(tensor.numpy(), name)


def _checked(array: Array, name: str) -> Plain:
    if array.ndim > MAX_DIMENSIONS:
        raise UnsupportedTensor(f"{array.ndim} dimensions can't be carried, only {MAX_DIMENSIONS}")
    return Plain(array, name)


def storage(dtype: str, shape: Sequence[int], nbytes: int) -> np.dtype[Any]:
    """The NumPy dtype that carries ``dtype``'s bits, after checking a declaration from a message.

    Nothing is allocated. Raises :class:`BadHandle` when dtype, shape and nbytes don't agree.
    """
    kind = _STORAGE.get(dtype)
    if kind is None:
        raise BadHandle(f"unknown dtype {dtype[:40]!r}")
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise BadHandle(f"bad shape ({len(shape)} dimensions, smallest {min(shape)})")
    if math.prod(shape) * kind.itemsize != nbytes:
        raise BadHandle(f"{nbytes} bytes are no {dtype} tensor of shape {tuple(shape)}")
    return kind


def over(buffer: Any, offset: int, kind: np.dtype[Any], shape: Sequence[int]) -> Array:
    """An array over a part of a buffer; the caller has checked the bounds. Raises :class:`BadHandle`."""
    try:
        return np.ndarray(tuple(shape), kind, buffer, offset)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadHandle(f"no array of shape {tuple(shape)}: {error}") from None


def revive(array: Array, dtype: str) -> Any:
    """What the receiver gets for the bits in ``array``: itself, or a torch tensor for torch's own dtypes.

    Raises :class:`UnsupportedTensor` when that needs torch and torch isn't installed.
    """
    if dtype not in _TORCH_ONLY:
        return array
    try:
        torch = _torch()
    except ImportError:
        raise UnsupportedTensor(f"NumPy has no {dtype}, and torch is not installed here") from None
    return torch.from_numpy(array).view(getattr(torch, dtype))


@functools.cache
def _torch() -> Any:
    # By name, so that the import linter sees: broker and gateway, which import this module, need no torch.
    torch = importlib.import_module("torch")
    with warnings.catch_warnings():
        # torch warns, once per process, that it can't protect read-only memory. Our callers are told.
        warnings.simplefilter("ignore")
        torch.from_numpy(np.frombuffer(b"\0", np.uint8))
    return torch


def from_bytes(dtype: str, shape: Sequence[int], data: bytes) -> Any:
    """A tensor from its C-contiguous bytes; it is read-only and keeps ``data``.

    Raises :class:`BadHandle` for a declaration that doesn't fit the bytes.
    """
    kind = storage(dtype, shape, len(data))
    return revive(over(data or b"\0", 0, kind, shape), dtype)
