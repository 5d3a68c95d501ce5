"""A denoiser that dies goes on from its last checkpoint, and the picture is the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.families.diffusion_rig import Rig, running

PARAMS = {"num_inference_steps": 5, "partial_images": 2}


@pytest.mark.parametrize("every", [1, 2])
async def test_a_break_after_any_step_gives_the_same_pictures_once_each(checkpoint: Path, every: int) -> None:
    async with running("sd3", checkpoint, f"denoiser.checkpoint_steps={every}") as rig:
        whole = await rig.paint({"prompt": "a boat"}, seed=3, **PARAMS)
        expected = whole.made["denoiser"]
        for after in range(5):
            with_gate = Steps(after)
            given = await rig.broken("denoiser", whole.made, 3, PARAMS, when=with_gate)
            assert [payload.get("partial") for payload in given] == [0, 1, None]
            for one, other in zip(given, expected, strict=True):
                np.testing.assert_allclose(one["latents"], other["latents"], rtol=0, atol=1e-6)


class Steps:
    """True after so many steps; it is asked before each."""

    def __init__(self, after: int) -> None:
        self._left = after

    def __call__(self, emitted: object, checkpoints: object) -> bool:
        self._left -= 1
        return self._left < 0


async def test_a_new_attempt_takes_no_step_before_its_checkpoint(checkpoint: Path) -> None:
    async with running("sd3", checkpoint, "denoiser.checkpoint_steps=2") as rig:
        whole = await rig.paint({"prompt": "a boat"}, seed=3, num_inference_steps=5)
        before = runner_steps(rig)
        await rig.broken("denoiser", whole.made, 3, {"num_inference_steps": 5}, when=Steps(3))
        # Three, the one in hand, and from the checkpoint after the second the three that are left.
        assert runner_steps(rig) - before == 3 + 1 + 3


async def test_nothing_is_computed_when_all_is_out(checkpoint: Path) -> None:
    async with running("sd3", checkpoint) as rig:
        whole = await rig.paint({"prompt": "a boat"}, seed=3, **PARAMS)
        before = runner_steps(rig)
        for stage in ("text", "denoiser", "vae"):
            again = await rig.stage(stage, whole.made, 3, PARAMS, attempt=2, emitted=len(whole.made[stage]))
            assert not any(again)
        assert runner_steps(rig) == before


def runner_steps(rig: Rig) -> int:
    steps: int = rig.engines["denoiser"].thread.runner.steps  # type: ignore[attr-defined]
    return steps
