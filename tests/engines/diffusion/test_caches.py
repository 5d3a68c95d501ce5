"""What all caches rest on, for each family; and the caches of other libraries."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.chunk import Payload
from tests.families.diffusion_rig import Array, Rig, at_once, running
from workers.engines.diffusion.caches.blocks import Blocks
from workers.engines.diffusion.family import Row


class Answers:
    """Remembers what the blocks added to each row, or says it in their place."""

    def __init__(self) -> None:
        self.added: Any = None
        self.modulated: Any = None
        self.answers = False

    def enter(self, transformer: int, modulated: Any) -> Any:
        self.modulated = modulated
        return self.added if self.answers else None

    def leave(self, transformer: int, added: Any) -> None:
        self.added = added


class Checked:
    """A denoiser's forward: each pass is computed plainly, listened to, and answered for."""

    def __init__(self, denoiser: Any) -> None:
        self.passes = 0
        self._forward = denoiser.forward
        self._transformers = denoiser.transformers
        self._blocks = Blocks(denoiser.transformers)

    def __call__(self, rows: Sequence[Row]) -> Any:
        import torch

        said = self._forward(rows)
        answers = Answers()
        with self._blocks.heard_by(answers):
            torch.testing.assert_close(self._forward(rows), said, rtol=0, atol=1e-6)
            answers.answers, shape = True, answers.added.shape
            torch.testing.assert_close(self._forward(rows), said, rtol=0, atol=1e-5)
        assert answers.modulated.shape == shape
        assert len(rows) == shape[0]
        # What the first block looks at has a mean of nearly 0 before the time shifts it, so it is no input.
        assert not torch.allclose(answers.modulated, torch.zeros(()))
        self.passes += 1
        return said


FAMILIES = {
    "sd3": ("sd3", "sd3_tiny"),
    "flux": ("flux", "flux_tiny"),
    "qwen_image": ("qwen_image", "qwen_image_tiny"),
    "glm_image": ("glm_image", "glm_image_tiny"),
    "wan2_2": ("wan2_2", "wan2_2_tiny"),
    "wan2_2, two transformers": ("wan2_2", "wan2_2_t2v_tiny"),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random model of each family, made when it is asked for."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("families")

    class Made(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            folder = self[name] = root / name
            importlib.import_module(f"pipelines.convert.{name}").convert(folder, folder)
            return folder

    made = Made()
    assert made["sd3_tiny"]  # the libraries open what they keep open before a test begins
    return made


def request_of(family: str) -> tuple[Payload, dict[str, Any]]:
    """One with both branches where the family can have them, as small as it can be."""
    params: dict[str, Any] = {"num_inference_steps": 3}
    if family == "glm_image":
        return {"prompt": "a red ring"}, params
    film = {"num_frames": 5} if family.startswith("wan") else {}
    return {"prompt": "a red ring", "negative_prompt": "dull"}, {**params, "width": 32, "height": 32, **film}


async def made_for(rig: Rig, request: Payload, params: dict[str, Any]) -> dict[str, list[Payload]]:
    made = {"request": [request]}
    for name in rig.pipeline.needed(list(rig.pipeline.outputs)[:1], {"request"}, set()):
        if name in rig.engines and name != "denoiser":
            made[name] = await rig.stage(name, made, 1, params)
    return made


@pytest.mark.parametrize("family", FAMILIES)
async def test_blocks_that_are_answered_for_leave_the_pass_as_it_is(
    family: str, folders: dict[str, Path]
) -> None:
    pipeline, maker = FAMILIES[family]
    stages = ("thinker", "text", "denoiser") if family == "glm_image" else ("text", "denoiser")
    async with running(pipeline, folders[maker], stages=stages) as rig:
        runner = rig.engines["denoiser"].thread.runner  # type: ignore[attr-defined]
        checked = runner.passes._forward = Checked(runner.denoiser)
        request, params = request_of(family)
        made = await made_for(rig, request, params)
        await rig.stage("denoiser", made, 1, params)
        assert checked.passes >= 3


#: What differs in all that a request can: steps, guidance, seed.
COMPANY: list[tuple[dict[str, Any], int]] = [
    ({"num_inference_steps": 5, "guidance_scale": 3.0}, 1),
    ({"num_inference_steps": 3, "guidance_scale": 2.0}, 2),
]


async def painted(rig: Rig, params: dict[str, Any], seed: int) -> Array:
    """The last latents of one request."""
    request, small = request_of("")
    params = {**small, **params}
    made = await made_for(rig, request, params)
    return np.asarray((await rig.stage("denoiser", made, seed, params))[-1]["latents"])


def apart(some: list[Array], others: list[Array]) -> float:
    """The largest difference."""
    return max(float(np.abs(one - other).max()) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize(
    ("cache", "family"), [("first-block", "qwen_image"), ("dbcache", "qwen_image"), ("dbcache", "flux")]
)
async def test_a_librarys_cache_is_each_requests_own(
    cache: str, family: str, folders: dict[str, Path]
) -> None:
    if cache == "dbcache":
        pytest.importorskip("cache_dit")
    settings = (f"denoiser.cache={cache}", "denoiser.checkpoint_steps=1")
    folder, stages = folders[f"{family}_tiny"], ("text", "denoiser")

    async def of(*more: str) -> tuple[list[Array], list[Array]]:
        async with running(family, folder, *more, stages=stages) as rig:
            alone = [await painted(rig, *each) for each in COMPANY]
            return alone, await at_once(*(painted(rig, *each) for each in COMPANY))

    plain, _ = await of()
    without, without_together = await of(*settings, "denoiser.cache_threshold=0")
    assert apart(without, plain) < 1e-5
    assert apart(without_together, plain) < 1e-5
    cached, together = await of(*settings, "denoiser.cache_threshold=1000")
    assert apart(cached, plain) > 1e-3  # it did something
    assert apart(together, cached) < 1e-5
    closed, _ = await of(*settings, "denoiser.cache_threshold=1000", "denoiser.cache_start=1")
    assert apart(closed, plain) < 1e-5
    async with running(family, folder, *settings, "denoiser.cache_threshold=1000", stages=stages) as rig:
        request, small = request_of("")
        params, seed = {**small, **COMPANY[0][0]}, COMPANY[0][1]
        left = iter([False] * 3)
        given = await rig.broken(
            "denoiser",
            await made_for(rig, request, params),
            seed,
            params,
            when=lambda out, states: next(left, True),
        )
        assert apart([np.asarray(given[-1]["latents"])], cached[:1]) < 1e-5


@pytest.mark.parametrize("cache", ["first-block", "dbcache"])
async def test_a_model_without_a_librarys_cache_is_refused_by_name(
    cache: str, folders: dict[str, Path]
) -> None:
    if cache == "dbcache":
        pytest.importorskip("cache_dit")
    with pytest.raises(ValueError, match=r"options\.cache.*SD3Transformer2DModel"):
        async with running(
            "sd3", folders["sd3_tiny"], f"denoiser.cache={cache}", stages=("text", "denoiser")
        ):
            pass
