"""The painter through its stages: it paints what a plain loop paints, and what the prompt says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from scripts.painter import settings
from scripts.painter.checker import right
from scripts.painter.prompts import evaluation
from tests.families.diffusion_rig import Rig, at_once, running
from workers.engine import ItemError

pytestmark = pytest.mark.models

STAGES = ("thinker", "denoiser", "vae")


@pytest.fixture(scope="module")
def plain() -> Any:
    """One process, a plain loop."""
    import torch

    from scripts.painter.painting import Plain

    torch.set_num_threads(1)
    trained = msgspec.json.decode((settings.WEIGHTS / "settings.json").read_bytes(), type=settings.Settings)
    return Plain.load(settings.WEIGHTS, trained.language_model, trained.layers, trained.max_tokens)


#: Requests that share nothing but their time.
REQUESTS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"prompt": "a small red star on white, at the top"}, {}, 1),
    ({"prompt": "a small red star on white, at the top"}, {"num_inference_steps": 7}, 2),
    ({"prompt": "on black a large green ring"}, {"num_inference_steps": 5, "guidance_scale": 4.0}, 3),
    ({"prompt": "blue cross"}, {"num_inference_steps": 3, "guidance_scale": 1.0}, 4),
    ({"prompt": ""}, {"num_inference_steps": 1, "guidance_scale": 0.0}, 5),
]


async def test_unequal_requests_in_one_batch_are_what_the_plain_loop_paints_alone(plain: Any) -> None:
    async with running("painter", None, stages=STAGES) as rig:
        painted = await at_once(
            *(rig.paint(request, seed=seed, **params) for request, params, seed in REQUESTS)
        )
    for one, (request, params, seed) in zip(painted, REQUESTS, strict=True):
        names = {"num_inference_steps": "steps", "guidance_scale": "guidance"}
        latents = plain.latents(
            [request["prompt"]], [seed], **{names[name]: value for name, value in params.items()}
        )
        np.testing.assert_allclose(one.latents, latents[0].numpy(), rtol=0, atol=1e-4)
        picture = plain.decode(latents)[0]
        assert np.abs(one.image.astype(np.int16) - picture).max() <= 1


async def test_a_negative_prompt_leads_away_and_the_empty_one_is_the_default() -> None:
    async with running("painter", None, stages=STAGES) as rig:
        prompt = {"prompt": "a circle"}
        plain, empty, led, unguided, one = [
            painted.latents
            for painted in await at_once(
                rig.paint(prompt, num_inference_steps=3),
                rig.paint(prompt | {"negative_prompt": ""}, num_inference_steps=3),
                rig.paint(prompt | {"negative_prompt": "red"}, num_inference_steps=3),
                rig.paint(prompt | {"negative_prompt": "red"}, num_inference_steps=3, guidance_scale=0.0),
                rig.paint(prompt, num_inference_steps=3, guidance_scale=1.0),
            )
        ]
    np.testing.assert_allclose(plain, empty, rtol=0, atol=1e-4)
    assert not np.allclose(plain, led, atol=1e-2)
    np.testing.assert_allclose(unguided, one, rtol=0, atol=1e-4)


async def test_held_out_prompts_are_painted_right() -> None:
    prompts = evaluation(8)
    async with running("painter", None, stages=STAGES) as rig:
        painted = await at_once(
            *(rig.paint({"prompt": prompt.text}, seed=seed) for seed, prompt in enumerate(prompts))
        )
    hits = [
        all(right(prompt.scene, one.image).values()) for prompt, one in zip(prompts, painted, strict=True)
    ]
    assert sum(hits) >= 7


@pytest.mark.parametrize("side", ["width", "height"])
async def test_other_sizes_are_refused_by_name(side: str) -> None:
    async with running("painter", None, stages=("thinker", "denoiser")) as rig:
        with pytest.raises(ItemError, match=f"size: the {side} is 128") as refused:
            await painted_by_denoiser(rig, **{side: 128})
    assert (refused.value.status, refused.value.param) == (400, "size")


async def painted_by_denoiser(rig: Rig, **params: Any) -> None:
    """Runs a request as far as the denoiser."""
    made: dict[str, Any] = {"request": [{"prompt": "a circle"}]}
    made["thinker"] = await rig.stage("thinker", made, 1, {})
    await rig.stage("denoiser", made, 1, params)


async def test_a_prompt_of_any_length_is_read_and_its_company_does_not_matter() -> None:
    from workers.families.painter.text import States

    states = States("smollm2-135m-instruct", 4, 24, device="cpu")
    texts = ["", "red", "a small red star " * 30]
    rows, pooled = states(texts)
    assert rows.shape[:2] == (3, 24)
    assert not rows[0].any()
    assert not pooled[0].any()
    assert rows[1, 0].any()
    assert not rows[1, 3:].any()
    assert rows[2].any(-1).all()
    for index, text in enumerate(texts):
        alone, mean = states([text])
        np.testing.assert_allclose(alone[0], rows[index], rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(mean[0], pooled[index], rtol=1e-5, atol=1e-4)


def test_the_weights_are_small_and_come_along() -> None:
    files = [file for file in Path(settings.WEIGHTS).rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 20_000_000
    figures = msgspec.json.decode((settings.WEIGHTS / "figures.json").read_bytes())
    assert figures["prompts"] == 300
    assert figures["right"] >= 0.9
