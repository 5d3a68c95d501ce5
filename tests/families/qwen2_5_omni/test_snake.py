"""The vocoder's activation as we compute it, against transformers'."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

from workers.families.qwen2_5_omni.snake import Activation, without_detour


@pytest.mark.parametrize("samples", [1, 2, 5, 640])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_activation_is_the_original_at_its_edges_too(samples: int, batch: int) -> None:
    torch.manual_seed(samples)
    original = modeling.Qwen2_5OmniAntiAliasedActivation1d(modeling.Qwen2_5OmniSnakeBeta(6))
    original.act.alpha.data.normal_()
    original.act.beta.data.normal_()
    signal = torch.randn(batch, 6, samples)
    with torch.inference_mode():
        assert torch.allclose(Activation(original)(signal), original(signal), atol=1e-5, rtol=1e-5)


def test_every_activation_is_replaced() -> None:
    block = modeling.Qwen2_5OmniAMPBlock(4)
    without_detour(block)
    assert [type(part) for part in block.activations] == [Activation] * len(block.activations)
    assert len(block.activations) == 6
