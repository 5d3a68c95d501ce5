"""cache-dit's DBCache: the first blocks run in every step, the others where these have changed."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from adapters.chunk import Payload
from workers.engines.diffusion.caches.cache import Window
from workers.engines.diffusion.caches.one_by_one import OneByOne
from workers.engines.diffusion.family import Denoiser, Row
from workers.engines.diffusion.tensors import as_tensor, copied
from workers.optional import library

if TYPE_CHECKING:
    import torch


class DualBlock(OneByOne):
    """For one denoiser.

    The library keeps one context for each list of blocks of a transformer. Here each row has contexts of its
    own, which take those places for its pass.

    Raises ValueError for transformers that the library knows no caches for, and MissingLibrary.
    """

    def __init__(self, denoiser: Denoiser, threshold: float, window: Window, blocks: int) -> None:
        super().__init__(denoiser, window)
        os.environ.setdefault("CACHE_DIT_LOG_LEVEL", "warning")  # it reports each list of blocks on stdout
        cache_dit = library("cache_dit", "caches")
        self._config = cache_dit.DBCacheConfig(
            Fn_compute_blocks=blocks,
            Bn_compute_blocks=0,
            residual_diff_threshold=threshold,
            max_warmup_steps=0,  # the window says when
            enable_separate_cfg=False,  # branches have contexts of their own
        )
        for transformer in denoiser.transformers:
            try:
                cache_dit.enable_cache(transformer, cache_config=copy.deepcopy(self._config))
            except (ValueError, AssertionError) as error:
                name = type(transformer).__name__
                raise ValueError(f"options.cache: DBCache for {name}: {error}") from None

    def state(self, row: Row) -> Payload:
        """The buffers of the row's contexts, "number/name" -> tensor. Empty before the first step."""
        return {
            f"{number}/{name}": copied(value)
            for number, context in enumerate(row.canvas.caches.get(row.branch, ()))
            for name, value in context.buffers.items()
            if hasattr(value, "detach")
        }

    def restore(self, row: Row, state: Payload) -> None:
        """Puts back what :meth:`state` gave. The context's counts begin anew; with this configuration only
        the buffers decide what is computed."""
        if not state:
            return
        device = row.canvas.latents.device
        contexts = row.canvas.caches[row.branch] = [make() for make in self._makers()]
        for key, value in state.items():
            number, _, name = key.partition("/")
            contexts[int(number)].set_buffer(name, as_tensor(value).clone().to(device))

    def forget(self, row: Row) -> None:
        """They were the canvas' own."""
        row.canvas.caches.pop(row.branch, None)

    def _within(self, row: Row) -> torch.Tensor:
        contexts = row.canvas.caches.setdefault(row.branch, [make() for make in self._makers()])
        for (manager, name), context in zip(self._places(), contexts, strict=True):
            manager._cached_context_manager[name] = context
        return self._denoiser.forward([row])

    def _places(self) -> Iterator[tuple[Any, str]]:
        """Where the library looks for the context of each list of blocks: its manager, and the name there."""
        for transformer in self._denoiser.transformers:
            for name in transformer._context_names:
                yield transformer._context_manager, name

    def _makers(self) -> Iterator[Any]:
        """What makes a new context, for each list of blocks."""
        for manager, name in self._places():
            yield lambda manager=manager, name=name: manager.new_context(
                name=name, cache_config=copy.deepcopy(self._config)
            )
