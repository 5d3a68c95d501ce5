"""diffusers' FirstBlockCache: the first block runs in every step, the others where it has changed."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from adapters.chunk import Payload
from workers.engines.diffusion.caches.cache import Window
from workers.engines.diffusion.caches.one_by_one import OneByOne, name_of
from workers.engines.diffusion.family import Denoiser, Row
from workers.engines.diffusion.tensors import as_tensor, copied

if TYPE_CHECKING:
    import torch

#: What a later step needs of a row's state, by the names that the library has for it.
_HEAD, _TAILS = "head_block_residual", "tail_block_residuals"


class FirstBlock(OneByOne):
    """For one denoiser. Raises ValueError for transformers that the library knows no caches for."""

    def __init__(self, denoiser: Denoiser, threshold: float, window: Window) -> None:
        super().__init__(denoiser, window)
        from diffusers.hooks import FirstBlockCacheConfig
        from diffusers.hooks.hooks import StateManager

        self._managers: list[Any] = []  # of each transformer: its states by the contexts' names
        for transformer in denoiser.transformers:
            name = type(transformer).__name__
            if not hasattr(transformer, "enable_cache"):
                raise ValueError(f"options.cache: diffusers has no FirstBlockCache for {name}")
            try:
                transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
            except ValueError as error:
                raise ValueError(f"options.cache: FirstBlockCache for {name}: {error}") from None
            # The library has no call that forgets one context, so its states are reached for here.
            self._managers += {
                id(value): value
                for module in transformer.modules()
                for hook in getattr(getattr(module, "_diffusers_hook", None), "hooks", {}).values()
                for value in vars(hook).values()
                if isinstance(value, StateManager)
            }.values()

    def state(self, row: Row) -> Payload:
        """Empty before the first step: "number/name" -> tensor, for each transformer."""
        kept: Payload = {}
        for number, manager in enumerate(self._managers):
            state = manager._state_cache.get(name_of(row))
            if state is not None and state.tail_block_residuals is not None:
                kept[f"{number}/{_HEAD}"] = copied(state.head_block_residual)
                for place, tensor in enumerate(state.tail_block_residuals):
                    if tensor is not None:
                        kept[f"{number}/{place}"] = copied(tensor)
        return kept

    def restore(self, row: Row, state: Payload) -> None:
        """Puts back what :meth:`state` gave."""
        device = row.canvas.latents.device

        def back(name: str) -> Any:
            return as_tensor(state[name]).clone().to(device) if name in state else None

        for number, manager in enumerate(self._managers):
            if f"{number}/{_HEAD}" in state:
                made = manager._state_cache[name_of(row)] = manager._state_cls()
                setattr(made, _HEAD, back(f"{number}/{_HEAD}"))
                setattr(made, _TAILS, (back(f"{number}/0"), back(f"{number}/1")))

    def forget(self, row: Row) -> None:
        """In all transformers."""
        for manager in self._managers:
            manager._state_cache.pop(name_of(row), None)

    def _within(self, row: Row) -> torch.Tensor:
        with ExitStack() as stack:
            for transformer in self._denoiser.transformers:
                stack.enter_context(transformer.cache_context(name_of(row)))
            return self._denoiser.forward([row])
