"""The text stage: one pass for all prompts of a request, and of all that wait; none changes another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.diffusion_rig import Rig, assert_same, reference, running


def passes_of(rig: Rig) -> list[list[tuple[str, str]]]:
    """Fills with the prompts of each pass."""
    encoder: Any = rig.engines["text"]._encoder  # type: ignore[attr-defined]
    encode, passes = encoder.encode, []

    def noted(prompts: Any) -> Any:
        passes.append([(prompt.branch, prompt.text) for prompt in prompts])
        return encode(prompts)

    encoder.encode = noted
    return passes


async def test_both_prompts_of_a_request_share_a_pass(checkpoint: Path) -> None:
    async with running("sd3", checkpoint, stages=("text",)) as rig:
        passes = passes_of(rig)
        made = {"request": [{"prompt": "a tree", "negative_prompt": "leaves"}]}
        both = await rig.stage("text", made, 1, {})
        assert [payload["branch"] for payload in both] == ["positive", "negative"]
        assert passes == [[("positive", "a tree"), ("negative", "leaves")]]
        (alone,) = await rig.stage("text", made, 1, {"guidance_scale": 1.0})
        assert passes[1] == [("positive", "a tree")]
        np.testing.assert_allclose(alone["embeds"], both[0]["embeds"], rtol=0, atol=1e-5)


async def test_a_prompt_of_several_pictures_is_read_once(checkpoint: Path) -> None:
    # What waits for half a second is company.
    async with running("sd3", checkpoint, "text.wait_ms=500", stages=("text",)) as rig:
        passes = passes_of(rig)
        same = [{"request": [{"prompt": prompt}]} for prompt in ("one", "one", "a longer one")]
        given = await asyncio.gather(*(rig.stage("text", made, n, {}) for n, made in enumerate(same)))
        assert passes == [[("positive", "one"), ("negative", ""), ("positive", "a longer one")]]
        np.testing.assert_array_equal(given[0][0]["embeds"], given[1][0]["embeds"])
        assert not np.array_equal(given[0][0]["embeds"], given[2][0]["embeds"])


async def test_a_checkpoint_without_t5_is_what_it_is_to_diffusers(pipe: Any, tmp_path: Path) -> None:
    from diffusers import StableDiffusion3Pipeline

    parts = {**pipe.components, "text_encoder_3": None, "tokenizer_3": None}
    small = StableDiffusion3Pipeline(**parts)
    small.save_pretrained(tmp_path)
    async with running("sd3", tmp_path) as rig:
        painted = await rig.paint({"prompt": "a hat"}, seed=2, num_inference_steps=2)
    assert_same(painted, reference(small, seed=2, prompt="a hat", num_inference_steps=2))
