"""Guidance in parallel: a second process computes the negative rows."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from pipelines.errors import PipelineError
from pipelines.loader import load
from tests.engines.diffusion.company import assert_equal, latents, together, with_settings
from tests.families.diffusion_rig import at_once, running
from workers.engine import ItemError
from workers.engines.diffusion.parallel import Rank, RankEnded
from workers.families.sd3.denoiser import Sd3

BAD = 2.5
FAMILY = "family=tests.engines.diffusion.test_parallel:Picky"


class Picky(Sd3):
    """Its passes fail for negative rows with a guidance scale that it does not like."""

    def forward(self, rows):  # type: ignore[no-untyped-def]
        if any(row.branch == "negative" and row.canvas.guidance == BAD for row in rows):
            raise ItemError("not to my liking", status=400, param="negative_prompt")
        return super().forward(rows)


async def test_the_second_process_says_what_one_process_would_and_a_bad_row_fails_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # where the second process finds Picky
    async with with_settings(checkpoint) as rig:
        expected = await together(rig)
    async with with_settings(checkpoint, "cfg=parallel", FAMILY) as rig:

        async def refused() -> ItemError:
            with pytest.raises(ItemError, match="not to my liking") as caught:
                await latents(rig, {"prompt": "a cup"}, {"num_inference_steps": 3, "guidance_scale": BAD}, 5)
            return caught.value

        given, error = await at_once(together(rig), refused())
        assert_equal(given, expected)
        assert (error.status, error.param) == (400, "negative_prompt")
        passes = rig.engines["denoiser"].thread.runner.passes
        assert passes._begun == 3  # the canvases with a negative branch
        assert not passes._numbers  # all have left
        second = passes._rank.process
        assert second.poll() is None
    assert second.returncode == 0


def test_a_second_process_that_dies_is_noticed_and_not_waited_for(checkpoint: Path) -> None:
    stage = load("sd3", ["denoiser.cfg=parallel"], [str(checkpoint)]).stages["denoiser"]
    rank = Rank(stage, "cpu")
    os.kill(rank.process.pid, signal.SIGKILL)
    with pytest.raises(RankEnded, match="SIGKILL"):
        rank.ready()


def test_a_second_process_that_cannot_load_says_so(checkpoint: Path) -> None:
    stage = load("sd3", ["denoiser.cfg=parallel"], [str(checkpoint)]).stages["denoiser"]
    rank = Rank(msgspec.structs.replace(stage, model="/nowhere/at/all"), "cpu")
    with pytest.raises(RankEnded, match="exit code 1"):
        rank.ready()


async def test_an_engine_that_cannot_load_leaves_no_second_process(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")  # there is a folder, and nothing in it
    with pytest.raises(ValueError, match="transformer"):
        async with running("sd3", tmp_path, "denoiser.cfg=parallel", stages=("denoiser",)):
            pass


def test_two_devices_are_for_guidance_in_parallel() -> None:
    two = "denoiser.tensor_parallel_size=2"
    load("sd3", ["denoiser.cfg=parallel", two, "denoiser.devices=[cuda:0, cuda:1]"])
    with pytest.raises(PipelineError, match="runs on one device"):
        load("sd3", [two, "denoiser.devices=[cuda:0, cuda:1]"])
