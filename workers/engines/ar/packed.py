"""Weights that lie in memory as oneDNN's products read them, for CPUs.

torch's linear layers arrange their weight anew in each product, which for few rows takes as long as the
product itself: with 8 to 32 rows they are up to twice as fast here, and a prompt's a quarter. The operators
are those that torch.compile uses for frozen weights; torch has no other door to them that needs no compiler.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import nn

from workers.engines.ar.family import Model

_ROWS = 16  # the layout is asked for this many, and suits others as well

log = logging.getLogger("engine")


def pack(model: Model) -> None:
    """Replaces all float32 linear layers and mixtures of experts in a model's attributes, once each."""
    if not _can_pack():
        log.warning("this build of torch packs no weights, so steps take up to twice as long")
        return
    made: dict[nn.Module, nn.Module] = {}
    for name, whole in list(vars(model).items()):
        if not isinstance(whole, nn.Module):
            continue
        holders: list[tuple[Any, str, nn.Module]] = [(model, name, whole)]
        holders += [(parent, *child) for parent in whole.modules() for child in parent.named_children()]
        for holder, attribute, layer in holders:
            if layer not in made and (kind := _packed_kind(layer)):
                made[layer] = kind(layer)
            if layer in made:
                setattr(holder, attribute, made[layer])


def _packed_kind(layer: nn.Module) -> type[nn.Module] | None:
    if type(layer) is nn.Linear:
        return Packed if layer.weight.dtype == torch.float32 else None
    weights = getattr(layer, "gate_up_proj", None), getattr(layer, "down_proj", None)
    if all(isinstance(each, nn.Parameter) and each.dtype == torch.float32 for each in weights):
        usual = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
        return PackedExperts if all(getattr(layer, name, None) is usual[name] for name in usual) else None
    return None


class Packed(nn.Module):  # type: ignore[misc]  # torch counts as untyped
    """A linear layer: [..., in_features] -> [..., out_features]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._weight = _arranged(linear.weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return _product(rows, self._weight, self.bias)


class PackedExperts(nn.Module):  # type: ignore[misc]
    """The experts of a mixture, as transformers has them: those that any row chose, one after the other."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._act = experts.act_fn
        self._gate_up = [_arranged(weight) for weight in experts.gate_up_proj]
        self._down = [_arranged(weight) for weight in experts.down_proj]

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Rows [n, hidden], each one's k experts int [n, k] and their weights [n, k] -> [n, hidden]."""
        experts, order = chosen.flatten().sort(stable=True)
        rows = hidden[order // chosen.shape[1]]
        parts, at = [], 0
        for number, count in enumerate(torch.bincount(experts, minlength=len(self._down)).tolist()):
            if count:
                gate, up = _product(rows[at : at + count], self._gate_up[number], None).chunk(2, dim=-1)
                parts.append(_product(self._act(gate) * up, self._down[number], None))
                at += count
        made = torch.cat(parts) * weights.flatten()[order, None]
        back = torch.empty_like(made)
        back[order] = made
        return back.view(*chosen.shape, -1).sum(1).to(hidden.dtype)


def _arranged(weight: torch.Tensor) -> Any:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)


def _product(rows: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return made


@functools.cache
def _can_pack() -> bool:
    """Whether the operators are there, and right."""
    layer, rows = nn.Linear(32, 16), torch.randn(3, 32)
    try:
        return bool(torch.allclose(Packed(layer)(rows), layer(rows), atol=1e-4))
    except (AttributeError, RuntimeError):
        return False
