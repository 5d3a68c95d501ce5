"""What the stages made against what diffusers makes."""

from __future__ import annotations

from typing import Any

from tests.families.diffusion_rig import Asked, Painted, assert_same, reference


def check(painted: Painted, pipe: Any, asked: Asked, **call: Any) -> None:
    """Against diffusers, whose name for the scale is true_cfg_scale, and which packs latents (2 x 2)."""
    request, params, seed = asked
    params = dict(params)
    if "guidance_scale" in params:
        params["true_cfg_scale"] = params.pop("guidance_scale")
    words = {name: request[name] for name in ("prompt", "negative_prompt") if name in request}
    expected = reference(pipe, seed=seed, **words, **params, **call)
    channels, height, width = painted.latents.shape
    packed = painted.latents.reshape(channels, height // 2, 2, width // 2, 2).transpose(1, 3, 0, 2, 4)
    painted.made["denoiser"][-1]["latents"] = packed.reshape(expected.latents.shape)
    assert_same(painted, expected)
