"""Requests come, go and fail between two steps, and what the others become does not change."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.chunk import Payload
from tests.engines.helpers import until
from tests.families.diffusion_rig import Rig, assert_same, at_once, reference, running
from workers.engine import ItemError

SIX = {"num_inference_steps": 6}


async def conditions(rig: Rig, prompt: str, **params: Any) -> dict[str, list[Payload]]:
    """What the denoiser gets of a prompt."""
    made: dict[str, list[Payload]] = {"request": [{"prompt": prompt}]}
    return {"text": await rig.stage("text", made, 1, params)}


async def test_who_comes_late_takes_part_in_the_next_step_and_who_is_done_leaves(
    checkpoint: Path, pipe: Any
) -> None:
    async with running("sd3", checkpoint, stages=("text", "denoiser")) as rig:
        first, second = await at_once(conditions(rig, "first"), conditions(rig, "second"))
        with rig.gate() as gate:
            early = asyncio.ensure_future(rig.stage("denoiser", first, 1, SIX))
            await gate.arrival()
            gate.open()
            await gate.arrival()  # before the second step
            late = asyncio.ensure_future(rig.stage("denoiser", second, 2, {"num_inference_steps": 2}))
            await asyncio.sleep(0)  # it has been handed to the thread
            gate.open(100)
            (last,), (short,) = await at_once(early, late)
    # The first of them has the second step in hand already.
    assert [len(rows) for rows in gate.taken] == [1, 1, 2, 2, 1, 1]
    for payload, prompt, seed, steps in ((last, "first", 1, 6), (short, "second", 2, 2)):
        expected = reference(pipe, seed=seed, prompt=prompt, num_inference_steps=steps)
        np.testing.assert_allclose(payload["latents"], expected.latents, rtol=0, atol=1e-4)


async def test_a_cancel_takes_effect_within_one_step(checkpoint: Path) -> None:
    async with running("sd3", checkpoint, stages=("text", "denoiser")) as rig:
        both = await conditions(rig, "a cube")
        with rig.gate() as gate:
            left, stays = (asyncio.ensure_future(rig.stage("denoiser", both, n, SIX)) for n in (1, 2))
            await gate.arrival()
            gate.open()
            await gate.arrival()
            left.cancel()
            await asyncio.wait([left])
            gate.open(100)
            await stays
    assert len(gate.taken) in (6, 7)  # the first step may have had one of them only
    assert all(len(rows) == 1 for rows in gate.taken[2:])


async def test_only_so_many_are_painted_at_once(checkpoint: Path) -> None:
    async with running("sd3", checkpoint, "denoiser.max_num_seqs=2", stages=("text", "denoiser")) as rig:
        both = await conditions(rig, "a cube")
        with rig.gate() as gate:
            gate.open(100)
            await at_once(*(rig.stage("denoiser", both, n, {"num_inference_steps": n}) for n in (2, 2, 3)))
    assert max(len(rows) for rows in gate.taken) == 2


async def test_what_is_not_finite_fails_its_own_request_and_says_at_which_step(
    checkpoint: Path, pipe: Any
) -> None:
    async with running("sd3", checkpoint) as rig:
        good = await conditions(rig, "good")
        bad = {"text": [{**good["text"][0], "pooled": np.full(32, np.nan, np.float32)}]}
        spoilt, painted = await asyncio.gather(
            rig.stage("denoiser", bad, 1, {"guidance_scale": 1.0, **SIX}),
            rig.paint({"prompt": "good"}, seed=2, **SIX),
            return_exceptions=True,
        )
        assert isinstance(spoilt, ItemError)
        assert "after step 1 of 6" in str(spoilt)
        assert spoilt.status == 500
        assert_same(painted, reference(pipe, seed=2, prompt="good", **SIX))


async def test_a_row_that_breaks_a_pass_fails_its_own_request_alone(checkpoint: Path, pipe: Any) -> None:
    async with running("sd3", checkpoint, stages=("text", "denoiser")) as rig:
        good = await conditions(rig, "good")
        bad = {"text": [{**part, "pooled": part["pooled"][:5]} for part in good["text"]]}
        spoilt, (kept,) = await asyncio.gather(
            rig.stage("denoiser", bad, 1, SIX), rig.stage("denoiser", good, 2, SIX), return_exceptions=True
        )
        assert isinstance(spoilt, RuntimeError)
        expected = reference(pipe, seed=2, prompt="good", **SIX)
        np.testing.assert_allclose(kept["latents"], expected.latents, rtol=0, atol=1e-4)


async def test_a_pass_that_is_too_large_is_taken_row_by_row(checkpoint: Path, pipe: Any) -> None:
    async with running("sd3", checkpoint, stages=("text", "denoiser")) as rig:
        denoiser: Any = rig.engines["denoiser"].thread.runner.denoiser  # type: ignore[attr-defined]
        forward = denoiser.forward

        def small(rows: Any) -> Any:
            if len(rows) > 1:
                raise RuntimeError("no memory for so many")
            return forward(rows)

        denoiser.forward = small
        (kept,) = await rig.stage("denoiser", await conditions(rig, "good"), 2, SIX)
        expected = reference(pipe, seed=2, prompt="good", **SIX)
        np.testing.assert_allclose(kept["latents"], expected.latents, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": -1}, "num_inference_steps"),
        ({"num_inference_steps": 1001}, "num_inference_steps"),
        ({"num_inference_steps": "4"}, "num_inference_steps"),
        ({"guidance_scale": -1.0}, "guidance_scale"),
        ({"partial_images": 4}, "partial_images"),
        ({"width": 0}, "width"),
        ({"width": 40}, "size"),
        ({"height": 512}, "size"),
    ],
)
async def test_what_no_schedule_or_size_can_be_is_refused_by_name(
    rig: Rig, params: dict[str, Any], field: str
) -> None:
    with pytest.raises(ItemError) as refusal:
        await rig.paint({"prompt": "x"}, **params)
    assert (refusal.value.status, refusal.value.param) == (400, field)


async def test_a_request_without_words_is_refused_by_name(rig: Rig) -> None:
    for request, field in (({}, "prompt"), ({"prompt": 3}, "prompt")):
        with pytest.raises(ItemError) as refusal:
            await rig.paint(request)
        assert (refusal.value.status, refusal.value.param) == (400, field)


async def test_pictures_on_the_way_come_in_order_and_change_nothing(rig: Rig, pipe: Any) -> None:
    for wanted, steps, given in ((0, 6, 0), (3, 6, 3), (3, 2, 1), (3, 1, 0)):
        painted = await rig.paint({"prompt": "a cup"}, partial_images=wanted, num_inference_steps=steps)
        assert [payload.get("partial") for payload in painted.made["vae"]] == [*range(given), None]
        assert_same(painted, reference(pipe, prompt="a cup", num_inference_steps=steps))


async def test_a_picture_on_the_way_is_what_its_step_is_headed_for(rig: Rig, pipe: Any) -> None:
    painted = await rig.paint({"prompt": "a cup"}, partial_images=3, num_inference_steps=6)
    steps = reference(pipe, prompt="a cup", num_inference_steps=6).steps
    sigmas = pipe.scheduler.sigmas.tolist()
    for partial, step in zip(painted.made["denoiser"][:3], (2, 3, 4), strict=True):
        before, after = steps[step - 2], steps[step - 1]
        speed = (after - before) / (sigmas[step] - sigmas[step - 1])
        wanted = before - sigmas[step - 1] * speed
        np.testing.assert_allclose(partial["latents"], wanted, rtol=0, atol=1e-3)


async def test_an_idle_engine_holds_nothing_of_its_last_request(checkpoint: Path) -> None:
    async with running("sd3", checkpoint) as rig:
        made = (await rig.paint({"prompt": "a cup"}, num_inference_steps=2)).made
        views = [payload[name] for payload in made["text"] for name in ("embeds", "pooled")]
        views += [payload["latents"] for payload in made["denoiser"]]
        held = [weakref.ref(view) for view in views]
        for name in ("denoiser", "vae"):
            await rig.stage(name, made, 1, {"num_inference_steps": 2})
        del made, views
        # Views pin blocks of shared memory that other requests wait for.
        await until(lambda: gc.collect() >= 0 and all(view() is None for view in held))
