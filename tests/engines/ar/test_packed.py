"""Packed weights compute what torch's own layers do, wherever a model keeps its layers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from workers.engines.ar import packed
from workers.engines.ar.packed import Packed, PackedExperts, pack


def random_rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Block(nn.Module):
    """Layers as transformers' models have them: in lists, below other modules, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(
            [nn.Linear(32, 48), nn.Sequential(nn.SiLU(), nn.Linear(48, 32, bias=False))]
        )
        self.again = self.layers[0]
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.half = nn.Linear(32, 32).bfloat16()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        out: torch.Tensor = self.head(hidden)
        return out


@pytest.mark.parametrize("rows", [(1, 24), (3, 24), (16, 24), (200, 24), (1, 7, 24), (0, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_a_linear_layer(rows: tuple[int, ...], bias: bool) -> None:
    layer = nn.Linear(24, 40, bias=bias)
    given = random_rows(*rows)
    with torch.inference_mode():
        torch.testing.assert_close(Packed(layer)(given), layer(given), atol=1e-5, rtol=1e-5)


def test_all_layers_of_a_model_are_packed_once_wherever_they_are() -> None:
    block, head = Block(), nn.Linear(50, 9)
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        expected, scores = block(ids), head(block(ids))
        model = SimpleNamespace(decoder=block, head=head, same=head, name="no module")
        pack(model)  # type: ignore[arg-type]
        torch.testing.assert_close(block(ids), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model.head(block(ids)), scores, atol=1e-5, rtol=1e-5)
    assert isinstance(model.head, Packed)
    assert model.head is model.same
    assert block.again is block.layers[0]
    assert [type(part) for part in block.modules() if isinstance(part, nn.Linear)] == [
        nn.Linear
    ]  # the half one
    assert isinstance(block.embed.weight, nn.Parameter)


@pytest.mark.parametrize("family", ["Thinker", "Talker"])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_packed_experts_are_those_of_transformers(family: str, rows: int) -> None:
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

    config: Any = SimpleNamespace(
        num_experts=6,
        hidden_size=16,
        moe_intermediate_size=24,
        hidden_act="silu",
        _experts_implementation="eager",
    )
    experts = getattr(modeling, f"Qwen3OmniMoe{family}TextExperts")(config)
    for number, weight in enumerate(experts.parameters()):
        weight.data = random_rows(*weight.shape) + number
    holder = SimpleNamespace(mixture=experts)
    hidden, scores = random_rows(rows, 16), random_rows(rows, 6)
    weights, chosen = scores.softmax(-1).topk(2)
    with torch.inference_mode():
        expected = experts(hidden, chosen, weights)
        pack(holder)  # type: ignore[arg-type]
        assert isinstance(holder.mixture, PackedExperts)
        torch.testing.assert_close(holder.mixture(hidden, chosen, weights), expected, atol=1e-3, rtol=1e-5)


def test_a_torch_that_cannot_pack_keeps_its_layers_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(weight: torch.Tensor) -> Any:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    monkeypatch.setattr(packed, "_arranged", missing)
    packed._can_pack.cache_clear()
    model = SimpleNamespace(head=nn.Linear(4, 4))
    with caplog.at_level(logging.WARNING, "engine"):
        pack(model)  # type: ignore[arg-type]
    packed._can_pack.cache_clear()
    assert type(model.head) is nn.Linear
    assert "packs no weights" in caplog.text
