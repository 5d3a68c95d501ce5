"""TeaCache under step-level batching: a request's cache is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.loader import load
from scripts.teacache import fit, observe
from tests.engines.diffusion.company import REQUESTS, alone, assert_equal, texts, together, with_settings
from tests.families.diffusion_rig import Rig
from workers.engines.diffusion.caches.teacache import polynomial

TEACACHE = ("cache=teacache", "cache_coefficients=[1.0, 0.0]")


def cache(rig: Rig) -> Any:
    """The denoiser's."""
    return rig.engines["denoiser"].thread.runner.passes.cache  # type: ignore[attr-defined]


async def test_threshold_zero_is_no_cache(checkpoint: Path) -> None:
    async with with_settings(checkpoint) as rig:
        expected = await together(rig)
    async with with_settings(checkpoint, *TEACACHE, "cache_threshold=0") as rig:
        assert_equal(await together(rig), expected)
        assert cache(rig).skipped == 0


async def test_company_changes_no_request_though_each_skips_other_steps(checkpoint: Path) -> None:
    async with with_settings(checkpoint, *TEACACHE, "cache_threshold=0.5") as rig:
        expected = await alone(rig)
        skipped, computed = cache(rig).skipped, cache(rig).computed
        assert skipped > 2, skipped
        assert computed > 2 * 5  # the first and the last step of five rows are always computed
        disagreements = 0
        distances = cache(rig).distances

        def counted(*arguments: Any) -> Any:
            nonlocal disagreements
            found = distances(*arguments)
            disagreements += len({bool(distance) for distance in found.values()}) > 1
            return found

        cache(rig).distances = counted
        assert_equal(await together(rig), expected)
        assert disagreements  # some rows of a pass skipped, and some did not
        assert (cache(rig).skipped, cache(rig).computed) == (2 * skipped, 2 * computed)
    async with with_settings(checkpoint) as rig:
        differ = [np.abs(one - other).max() for one, other in zip(await alone(rig), expected, strict=True)]
        assert max(differ) > 1e-2  # the cache did something


@pytest.mark.parametrize(
    ("settings", "skipped"),
    [((), 4), (("cache_start=0.5",), 2), (("cache_end=0.5",), 2), (("cache_start=0.4", "cache_end=0.6"), 1)],
)
async def test_the_window_says_in_which_steps(
    checkpoint: Path, settings: tuple[str, ...], skipped: int
) -> None:
    (request, params, seed), *_ = REQUESTS
    async with with_settings(checkpoint, *TEACACHE, "cache_threshold=1000", *settings) as rig:
        made = await texts(rig, request, params, seed)
        await rig.stage("denoiser", made, seed, params)
        assert cache(rig).skipped == skipped * 2  # of six steps, both branches


async def test_a_new_attempt_goes_on_with_what_the_cache_knew(checkpoint: Path) -> None:
    (request, params, seed), *_ = REQUESTS
    every = "checkpoint_steps=1"
    async with with_settings(checkpoint, *TEACACHE, "cache_threshold=1000", every) as rig:
        made = await texts(rig, request, params, seed)
        whole = await rig.stage("denoiser", made, seed, params)
        for after in (1, 3):
            left = iter([False] * after)
            given = await rig.broken(
                "denoiser", made, seed, params, when=lambda out, states, left=left: next(left, True)
            )
            np.testing.assert_allclose(given[-1]["latents"], whole[-1]["latents"], rtol=0, atol=1e-5)


async def test_the_second_process_has_caches_and_checkpoints_too(checkpoint: Path) -> None:
    (request, params, seed), *_ = REQUESTS
    settings = (*TEACACHE, "cache_threshold=0.3", "checkpoint_steps=2")
    async with with_settings(checkpoint, *settings) as rig:
        made = await texts(rig, request, params, seed)
        expected = await rig.stage("denoiser", made, seed, params)
    async with with_settings(checkpoint, *settings, "cfg=parallel") as rig:
        left = iter([False] * 4)
        given = await rig.broken("denoiser", made, seed, params, when=lambda out, states: next(left, True))
        np.testing.assert_allclose(given[-1]["latents"], expected[-1]["latents"], rtol=0, atol=1e-5)


async def test_without_coefficients_it_says_where_they_come_from(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"cache_coefficients.*calibrate_teacache"):
        async with with_settings(checkpoint, "cache=teacache"):
            pass


def test_the_polynomial_begins_with_its_highest_power() -> None:
    assert polynomial([2.0, 3.0, 5.0], 10.0) == 235.0


async def test_calibration_observes_each_two_neighbouring_steps_and_finds_the_polynomial(
    checkpoint: Path,
) -> None:
    graph = load("sd3", ["text.threads=1", "denoiser.threads=1"], [str(checkpoint)])
    params = {"num_inference_steps": 5, "width": 32, "height": 32}
    pairs = await observe(graph, ["a red ring", "a blue cube"], params, "cpu")
    assert len(pairs) == 2 * 2 * 4  # pictures, branches, pairs of steps
    assert all(0 < seen < 10 and 0 < added < 10 for seen, added in pairs)
    exact = [(x / 10, polynomial([2.0, -1.0, 0.5], x / 10)) for x in range(9)]
    found = fit(exact, 2)
    np.testing.assert_allclose(found["coefficients"], [2.0, -1.0, 0.5], atol=1e-6)
    assert found["r_squared"] > 0.999
