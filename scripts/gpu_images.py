"""``scripts/gpu_check images``: the stages of all picture and film families on a CUDA device.

Each family's requests, unequal in steps, guidance and seeds and painted at once, are compared with what
diffusers' own pipeline makes of each alone, on the same small random weights, in float32 and without TF32;
once more with guidance in parallel (on a second GPU where there is one), with a cache that may skip nothing,
and after a break. Then the benchmark ``images`` runs.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipelines.loader import load

#: What is asked of each family beside its own settings: steps, seed, and whether guidance is off.
COMPANY = ((4, 1, False), (3, 2, False), (2, 3, True), (1, 4, False))


class Family(NamedTuple):
    """What differs between the families."""

    pipeline: str
    maker: str  #: module with ``convert``
    theirs: str  #: diffusers' pipeline
    asks: dict[str, Any]  #: of each request
    scale: str = "guidance_scale"  #: what turns guidance on, in diffusers' words
    negative: bool = True  #: takes a negative prompt
    ours: str = "guidance_scale"  #: the same in ours
    settings: tuple[str, ...] = ()
    params: dict[str, Any] = {}  # noqa: RUF012 (nobody changes it) #: of our requests alone


SMALL = {"width": 64, "height": 32}
FAMILIES = (
    Family("sd3", "sd3_tiny", "StableDiffusion3Pipeline", SMALL),
    Family("flux", "flux_tiny", "FluxPipeline", SMALL, scale="true_cfg_scale", ours="true_cfg_scale"),
    Family("qwen_image", "qwen_image_tiny", "QwenImagePipeline", SMALL, scale="true_cfg_scale"),
    Family(
        "glm_image",
        "glm_image_tiny",
        "GlmImagePipeline",
        {"width": 64, "height": 64},
        negative=False,
        settings=("thinker.kv_cache_gib=0.05", "thinker.block_size=16"),
        params={"temperature": 0.0},
    ),
    Family("wan2_2", "wan2_2_tiny", "WanPipeline", {**SMALL, "num_frames": 5}),
    Family("wan2_2", "wan2_2_t2v_tiny", "WanPipeline", {**SMALL, "num_frames": 5}),
)


def checks(options: argparse.Namespace, gpus: int) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """What there is to check: its name, and what says what is wrong."""
    second = ["denoiser.tensor_parallel_size=2", "denoiser.devices=[cuda:0, cuda:1]"] if gpus > 1 else []
    how = {
        "batched": [],
        "parallel": ["denoiser.cfg=parallel", *second],
        "cache that skips nothing": [
            "denoiser.cache=teacache",
            "denoiser.cache_coefficients=[1.0, 0.0]",
            "denoiser.cache_threshold=0",
        ],
    }
    for family in FAMILIES:
        for name, settings in how.items():
            what = f"{family.maker}, {name}"
            yield what, lambda f=family, s=settings, w=what: _compare(f, s, options, w)  # type: ignore[misc]
    yield "sd3_tiny, broken", lambda: _broken(options)


def bench(options: argparse.Namespace) -> list[str]:
    """Arguments of ``scripts/bench``."""
    return ["images", "--device", options.device, *options.bench]


def _compare(family: Family, settings: list[str], options: argparse.Namespace, what: str) -> list[str]:
    """What differs. Prints a line for each request."""
    import diffusers

    rigs = importlib.import_module("tests.families.diffusion_rig")
    failures = []
    with tempfile.TemporaryDirectory(prefix="omni-gpu-") as name:
        folder = _made(family, Path(name))
        pipe = getattr(diffusers, family.theirs).from_pretrained(folder).to(options.device)
        if family.pipeline == "glm_image":
            pipe.vision_language_encoder.generation_config.top_k = 1
        painted = asyncio.run(_painted(rigs, family, folder, settings, options.device))
        for (steps, seed, plain), ours in zip(COMPANY, painted, strict=True):
            call = {**_words(family, seed), **family.asks, "num_inference_steps": steps}
            theirs = rigs.reference(pipe, seed=seed, **call, **{family.scale: 1.0 if plain else 3.0})
            if not np.isfinite(theirs.latents).all():
                sound = bool(np.isfinite(ours.latents).all())
                print(f"{what}, {steps} steps: diffusers makes NaN of it; ours are finite: {sound}")
                failures += [] if sound else [f"{steps} steps: not finite"]
                continue
            latents = _as_theirs(ours.latents, theirs.latents)
            pixels = ours.frames if "frames" in ours.made["vae"][-1] else ours.image
            levels = np.round(np.clip(theirs.pixels, 0, 1) * 255)
            apart = float(np.abs(latents - theirs.latents).max())
            off = int(np.abs(pixels.astype(np.int16) - levels).max())
            print(f"{what}, {steps} steps: latents apart by {apart:.2g}, pixels by {off} of 255", flush=True)
            if not apart <= options.tolerance:
                failures.append(f"{steps} steps: latents are apart by {apart:.2g}")
            if off > 1:
                failures.append(f"{steps} steps: pixels are apart by {off}")
    return failures


def _made(family: Family, folder: Path) -> Path:
    importlib.import_module(f"pipelines.convert.{family.maker}").convert(folder / "model", folder / "model")
    return folder / "model"


def _words(family: Family, seed: int) -> dict[str, Any]:
    negative = {"negative_prompt": f"dull {seed}"} if family.negative else {}
    return {"prompt": f"a red ring {seed}", **negative}


def _as_theirs(latents: Any, theirs: Any) -> Any:
    """Some pipelines of diffusers keep patches of 2 x 2 in a row."""
    if latents.shape == theirs.shape:
        return latents
    channels, height, width = latents.shape
    packed = latents.reshape(channels, height // 2, 2, width // 2, 2).transpose(1, 3, 0, 2, 4)
    return packed.reshape(theirs.shape)


async def _painted(rigs: Any, family: Family, folder: Path, settings: list[str], device: str) -> list[Any]:
    """All at once."""
    async with rigs.running(
        family.pipeline, folder, *_exact(family), *family.settings, *settings, device=device
    ) as rig:
        return list(
            await asyncio.gather(
                *(
                    rig.paint(
                        _words(family, seed),
                        seed=seed,
                        num_inference_steps=steps,
                        **{family.ours: 1.0 if plain else 3.0},
                        **family.asks,
                        **family.params,
                    )
                    for steps, seed, plain in COMPANY
                )
            )
        )


def _exact(family: Family) -> list[str]:
    return [f"{name}.dtype=float32" for name, stage in load(family.pipeline).stages.items() if stage.model]


def _broken(options: argparse.Namespace) -> list[str]:
    """A denoiser that stops after any step goes on to the same picture."""
    rigs = importlib.import_module("tests.families.diffusion_rig")
    family, params = FAMILIES[0], {"num_inference_steps": 5, **SMALL}

    async def run(folder: Path) -> float:
        settings = [*_exact(family), "denoiser.checkpoint_steps=2"]
        async with rigs.running(family.pipeline, folder, *settings, device=options.device) as rig:
            whole = await rig.paint(_words(family, 1), seed=1, **params)
            apart = 0.0
            for after in range(5):
                left = iter([False] * after)
                given = await rig.broken(
                    "denoiser", whole.made, 1, params, when=lambda *seen, left=left: next(left, True)
                )
                apart = max(apart, float(np.abs(given[-1]["latents"] - whole.latents).max()))
            return apart

    with tempfile.TemporaryDirectory(prefix="omni-gpu-") as name:
        apart = asyncio.run(run(_made(family, Path(name))))
    print(f"sd3_tiny, broken after each of its steps: latents apart by {apart:.2g}", flush=True)
    return [] if apart <= options.tolerance else [f"latents are apart by {apart:.2g}"]
