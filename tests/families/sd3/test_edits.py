"""Pictures that are changed: equal to diffusers' own pipelines for it, after a break too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families.diffusion_rig import Rig, assert_same, at_once, reference
from tests.families.requests import picture
from workers.engine import ItemError

MASK = np.zeros((60, 100), np.uint8)
MASK[10:50, 30:70] = 255
#: Request without its picture, parameters, seed.
EDITS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"prompt": "in snow"}, {"num_inference_steps": 5}, 1),
    ({"prompt": "in snow"}, {"num_inference_steps": 5}, 2),
    ({"prompt": "in rain"}, {"num_inference_steps": 4, "strength": 0.3, "guidance_scale": 1.0}, 3),
    ({"prompt": "in fog"}, {"num_inference_steps": 3, "strength": 1.0}, 4),
    ({"prompt": "in sun", "mask": MASK}, {"num_inference_steps": 5, "strength": 0.8}, 5),
    ({"prompt": "at night", "mask": MASK}, {"num_inference_steps": 3, "strength": 1.0}, 6),
]
SIZE = {"width": 80, "height": 48}


def edited(pipe: Any, request: dict[str, Any], params: dict[str, Any], seed: int) -> Any:
    """What diffusers makes of it."""
    from diffusers import StableDiffusion3Img2ImgPipeline, StableDiffusion3InpaintPipeline
    from PIL import Image

    given = {"image": Image.fromarray(picture(60, 100))}
    kind = StableDiffusion3Img2ImgPipeline
    if "mask" in request:
        kind, given["mask_image"] = StableDiffusion3InpaintPipeline, Image.fromarray(request["mask"])
    own = kind(**pipe.components)
    made = reference(own, seed=seed, prompt=request["prompt"], **given, **{**SIZE, **params})
    if "mask" in request:
        # diffusers 0.42's pipeline for masks decodes without the VAE's shift, which all its others add.
        made.pixels = decoded(pipe, made.latents)
    return made


def decoded(pipe: Any, latents: Any) -> Any:
    """As StableDiffusion3Pipeline does it: [H, W, 3], 0 to 1."""
    import torch

    with torch.inference_mode():
        scaled = torch.from_numpy(latents)[None] / pipe.vae.config.scaling_factor
        pixels = pipe.vae.decode(scaled + pipe.vae.config.shift_factor).sample
    return pipe.image_processor.postprocess(pixels, output_type="np")[0]


async def change(rig: Rig, request: dict[str, Any], params: dict[str, Any], seed: int) -> Any:
    given = {**request, "images": [picture(60, 100)]}
    return await rig.paint(given, seed=seed, has=("image",), **params)


async def test_unequal_edits_in_one_batch_with_a_drawing_are_what_each_is_alone(rig: Rig, pipe: Any) -> None:
    *painted, drawn = await at_once(
        *(change(rig, request, {**SIZE, **params}, seed) for request, params, seed in EDITS),
        rig.paint({"prompt": "a sea"}, seed=7, num_inference_steps=3, **SIZE),
    )
    for one, edit in zip(painted, EDITS, strict=True):
        assert_same(one, edited(pipe, *edit))
    assert_same(drawn, reference(pipe, seed=7, prompt="a sea", num_inference_steps=3, **SIZE))


async def test_a_broken_edit_with_a_mask_goes_on(rig: Rig) -> None:
    request, params, seed = EDITS[4][0], {"num_inference_steps": 8, "strength": 0.8}, 5
    whole = await change(rig, request, params, seed)
    again = await rig.broken("denoiser", whole.made, seed, params, when=lambda _, states: bool(states))
    np.testing.assert_allclose(again[-1]["latents"], whole.latents, rtol=0, atol=1e-6)


async def test_without_a_size_it_is_as_large_as_the_picture_within_the_models_bounds(rig: Rig) -> None:
    small = await change(rig, {"prompt": "x"}, {"num_inference_steps": 1}, 1)
    # 60 x 100 pixels are more than the 64 x 64 that this model draws by default.
    assert small.image.shape == (48, 80, 3)


@pytest.mark.parametrize("strength", [1e-3, 1e-17])
async def test_however_little_may_change_the_last_step_is_taken(rig: Rig, strength: float) -> None:
    params = {"num_inference_steps": 4, "strength": strength, **SIZE}
    assert (await change(rig, {"prompt": "x"}, params, 1)).image.shape == (48, 80, 3)


@pytest.mark.parametrize(
    ("images", "params", "field"),
    [
        (2, {}, "image"),
        (0, {}, "image"),
        (1, {"strength": 0.0}, "strength"),
        (1, {"strength": 1.1}, "strength"),
        (1, {"width": 24}, "size"),
        (1, {"width": 512, "height": 512}, "size"),
        (1, {"true_cfg_scale": 4.0}, "true_cfg_scale"),
        (1, {"guidance_scale_2": 4.0}, "guidance_scale_2"),
    ],
)
async def test_an_edit_that_cannot_be_is_refused_by_name(
    rig: Rig, images: int, params: dict[str, Any], field: str
) -> None:
    request = {"prompt": "x", "images": [picture(32, 32)] * images}
    with pytest.raises(ItemError) as refusal:
        await rig.paint(request, has=("image",), **params)
    assert (refusal.value.status, refusal.value.param) == (400, field)


async def test_a_vae_that_takes_no_pictures_is_refused_at_the_start(checkpoint: Path) -> None:
    from tests.engines.helpers import stage, started
    from workers.engines.diffusion_vae import DiffusionVaeEngine

    options = {"family": "workers.families.kl_vae:KlVae", "encodes": True}
    engine = DiffusionVaeEngine(stage("diffusion-vae", model=str(checkpoint), options=options), device="cpu")
    with pytest.raises(ValueError, match=r"options\.encodes"):
        async with started(engine):
            pass
