"""BigVGAN's activation without its detour, for CPUs.

The activation doubles the rate of a signal with a filter, bends it, and halves the rate again. transformers
does so with convolutions of one channel each, for which CPUs have no good code. Here the even and the odd
samples of the doubled signal are computed apart, as sums of shifted copies: half of the filter's taps meet
each of them, the zeros between the samples are never multiplied, and nothing is interleaved and torn apart
again. One and a half to three times as fast; equal but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_TAPS = 12  # of both filters; the only length that BigVGAN has
_EDGE = 3  # samples that a filter sees beyond either end

Taps = Sequence[tuple[int, float]]  # (shift, weight)


def without_detour(vocoder: nn.Module) -> None:
    """Replaces all activations of a loaded BigVGAN."""
    for parent in list(vocoder.modules()):
        for name, child in parent.named_children():
            if hasattr(child, "upsample") and hasattr(child, "downsample"):
                setattr(parent, name, Activation(child))


class Activation(nn.Module):  # type: ignore[misc]  # torch counts as untyped
    """x + sin²(αx) / β at twice the rate: [batch, channels, samples] -> the same shape.

    Args:
        original: transformers' module, whose filters and parameters these are.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        up = (original.upsample.filter.flatten() * original.upsample.ratio).tolist()
        down = original.downsample.filter.flatten().tolist()
        if len(up) != _TAPS or len(down) != _TAPS or original.upsample.ratio != 2:
            raise ValueError(f"filters of {len(up)} and {len(down)} taps; {_TAPS} are known")
        up.reverse()
        self._to_even: Taps = list(enumerate(up[0::2]))
        self._to_odd: Taps = list(enumerate(up[1::2], 1))
        self._from_even: Taps = list(enumerate(down[1::2], 1))
        self._from_odd: Taps = list(enumerate(down[0::2]))
        self.alpha = nn.Parameter(torch.exp(original.act.alpha.detach())[:, None], requires_grad=False)
        beta = torch.exp(original.act.beta.detach())[:, None] + original.act.no_div_by_zero
        self.height = nn.Parameter(1 / beta, requires_grad=False)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        """See the class."""
        count = signal.shape[-1]
        wide = functional.pad(signal, (_EDGE, _EDGE), mode="replicate")
        even = self._bent(_filtered(wide, count, self._to_even))
        odd = self._bent(_filtered(wide, count, self._to_odd))
        first, last = (edge.expand(*edge.shape[:-1], _EDGE) for edge in (even[..., :1], odd[..., -1:]))
        out = _filtered(torch.cat([first, even, last], -1), count, self._from_even)
        return _filtered(torch.cat([first, odd, last], -1), count, self._from_odd, out)

    def _bent(self, signal: torch.Tensor) -> torch.Tensor:
        """In place."""
        return signal.addcmul_(torch.mul(signal, self.alpha).sin_().square_(), self.height)


def _filtered(wide: torch.Tensor, count: int, taps: Taps, total: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of shifted copies, ``count`` samples of it, added to ``total`` where there is one."""
    for shift, weight in taps:
        part = wide[..., shift : shift + count]
        if total is None:
            total = part * weight
        else:
            total.add_(part, alpha=weight)
    assert total is not None
    return total
