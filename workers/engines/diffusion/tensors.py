"""Tensors of payloads, and noise."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def as_tensor(value: Any) -> torch.Tensor:
    """A payload's tensor as torch's; NumPy's read-only views are shared, not copied: never write to it."""
    import torch

    if isinstance(value, torch.Tensor):
        return value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of views that are read-only
        return torch.from_numpy(value)


def copied(value: Any) -> Any:
    """A tensor's copy on the CPU; other values themselves."""
    import torch

    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def noise(shape: Sequence[int], seed: int, device: Any, dtype: Any, *, skip: int = 0) -> torch.Tensor:
    """Noise as diffusers draws it with a generator on the CPU that has this seed: the same on any device.

    ``skip``: so many draws of this shape came before.
    """
    import torch

    generator = torch.Generator("cpu").manual_seed(seed)
    for _ in range(skip):
        torch.randn(tuple(shape), generator=generator, dtype=dtype)
    return torch.randn(tuple(shape), generator=generator, dtype=dtype).to(device)
