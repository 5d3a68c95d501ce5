"""What computes the rows of a stage: its denoiser, loaded, with the cache that the options name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pipelines.graph import Stage
from pipelines.options import DiffusionOptions, options_of
from workers.engines.diffusion.passes import Passes
from workers.families.find import find_class
from workers.families.libraries import load_diffusers

if TYPE_CHECKING:
    from workers.engines.diffusion.caches.cache import Cache
    from workers.engines.diffusion.family import Denoiser


def build(stage: Stage, device: str) -> tuple[Denoiser, Passes]:
    """Loads. Raises MissingLibrary, ModelError, ValueError, or what the family raises."""
    options = options_of(stage, DiffusionOptions)
    # Nearly all that a picture costs is computed here, so on a CPU all cores do; workers, ranks share them.
    cores = max(1, len(os.sched_getaffinity(0)) // max(1, stage.resources.most))
    load_diffusers(stage, stage.resources.threads or (cores if options.cfg != "parallel" else 0))
    denoiser: Denoiser = find_class(options.family)(stage.model or "", options, device)
    return denoiser, Passes(
        denoiser,
        stage.batch.max_batch_size,
        sequential=options.cfg == "sequential",
        cache=_cache(denoiser, options),
    )


def _cache(denoiser: Denoiser, options: DiffusionOptions) -> Cache | None:
    from workers.engines.diffusion.caches.cache import Window

    window = Window(options.cache_start, options.cache_end)
    if options.cache == "teacache":
        from workers.engines.diffusion.caches.teacache import TeaCache

        return TeaCache(denoiser, options.cache_threshold, window, options.cache_coefficients)
    if options.cache == "first-block":
        from workers.engines.diffusion.caches.first_block import FirstBlock

        return FirstBlock(denoiser, options.cache_threshold, window)
    if options.cache == "dbcache":
        from workers.engines.diffusion.caches.dbcache import DualBlock

        return DualBlock(denoiser, options.cache_threshold, window, options.cache_blocks)
    return None
