"""The blocks of diffusers' transformers: passes in which somebody else answers for them.

A transformer embeds its inputs, sends them through its blocks and projects what comes out. Here the blocks of
a loaded one are given a door each. While a :class:`Listener` listens, it hears what goes into the first block
and what all of them have added in the end, and may say itself what they add, in which case none of them runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch


class Listener(Protocol):
    """Told of one pass. ``transformer``: the number of the one that computes it."""

    def enter(self, transformer: int, modulated: torch.Tensor) -> torch.Tensor | None:
        """What the first block is about to look at, [rows, tokens, width]: the embedded latents, normalised
        and modulated by the step's time. Returns what the blocks add to their input, or None: they run."""
        ...

    def leave(self, transformer: int, added: torch.Tensor) -> None:
        """The blocks ran and added this, [rows, tokens, width]."""
        ...


class Kind(NamedTuple):
    """A class of transformers of diffusers."""

    lists: tuple[str, ...]  #: its lists of blocks, in the order in which they run
    returns: tuple[str, ...]  #: what a block returns, by the names of its arguments
    #: (block, its arguments by name) -> what its first normalisation makes of the latents
    modulated: Callable[[Any, Mapping[str, Any]], torch.Tensor]


def _adaptive(block: Any, given: Mapping[str, Any]) -> torch.Tensor:
    said: torch.Tensor = block.norm1(given["hidden_states"], emb=given["temb"])[0]
    return said


def _qwen(block: Any, given: Mapping[str, Any]) -> torch.Tensor:
    first = block.img_mod(given["temb"]).chunk(2, dim=-1)[0]
    normed = block.img_norm1(given["hidden_states"])
    said: torch.Tensor = block._modulate(normed, first, given.get("modulate_index"))[0]
    return said


def _wan(block: Any, given: Mapping[str, Any]) -> torch.Tensor:
    hidden, time = given["hidden_states"], given["temb"].float()
    if time.ndim == 4:  # a time for each token
        shift, scale = (block.scale_shift_table[None] + time)[:, :, :2].unbind(2)
    else:
        shift, scale = (block.scale_shift_table + time)[:, :2].split(1, dim=1)
    said: torch.Tensor = block.norm1(hidden.float()) * (1 + scale) + shift
    return said


def _glm(block: Any, given: Mapping[str, Any]) -> torch.Tensor:
    said: torch.Tensor = block.norm1(given["hidden_states"], given["encoder_hidden_states"], given["temb"])[0]
    return said


_HIDDEN, _ENCODER = "hidden_states", "encoder_hidden_states"

KINDS = {
    "SD3Transformer2DModel": Kind(("transformer_blocks",), (_ENCODER, _HIDDEN), _adaptive),
    "FluxTransformer2DModel": Kind(
        ("transformer_blocks", "single_transformer_blocks"), (_ENCODER, _HIDDEN), _adaptive
    ),
    "QwenImageTransformer2DModel": Kind(("transformer_blocks",), (_ENCODER, _HIDDEN), _qwen),
    "WanTransformer3DModel": Kind(("blocks",), (_HIDDEN,), _wan),
    "GlmImageTransformer2DModel": Kind(("transformer_blocks",), (_HIDDEN, _ENCODER), _glm),
}


class Blocks:
    """The blocks of the transformers of one denoiser. They stay as they are while nobody listens.

    Raises ValueError for transformers of a class that is not in :data:`KINDS`, and for no transformers.
    """

    def __init__(self, transformers: Sequence[Any]) -> None:
        self._listener: Listener | None = None
        if not transformers:
            raise ValueError("options.cache: this family has no caches")
        for number, transformer in enumerate(transformers):
            name = type(transformer).__name__
            if name not in KINDS:
                raise ValueError(f"options.cache: not known for {name}; known: {', '.join(KINDS)}")
            self._open(number, transformer, KINDS[name])

    @contextmanager
    def heard_by(self, listener: Listener) -> Iterator[None]:
        """Passes within are told to this one."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def _open(self, number: int, transformer: Any, kind: Kind) -> None:
        blocks = [block for name in kind.lists for block in getattr(transformer, name)]
        crossing: dict[str, Any] = {}  # of the pass in hand: what went in, and whether the blocks run
        for block in blocks:
            ends = (block is blocks[0], block is blocks[-1])
            block.forward = self._door(block, (number, kind), ends, crossing)

    def _door(
        self, block: Any, of: tuple[int, Kind], ends: tuple[bool, bool], crossing: dict[str, Any]
    ) -> Callable[..., Any]:
        (number, kind), (first, last) = of, ends
        original, names = block.forward, inspect.signature(block.forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            listener = self._listener
            if listener is None:
                return original(*args, **kwargs)
            given = dict(names.bind(*args, **kwargs).arguments)
            if first:
                crossing["entered"] = given[_HIDDEN]
                added = listener.enter(number, kind.modulated(block, given))
                crossing["skips"] = added is not None
                if added is not None:
                    given[_HIDDEN] = given[_HIDDEN] + added
            if crossing["skips"]:
                return _as_returned(kind, given)
            result = original(*args, **kwargs)
            if last:
                hidden = result if len(kind.returns) == 1 else result[kind.returns.index(_HIDDEN)]
                listener.leave(number, hidden - crossing.pop("entered"))
            return result

        return forward


def _as_returned(kind: Kind, given: Mapping[str, Any]) -> Any:
    values = tuple(given[name] for name in kind.returns)
    return values if len(values) > 1 else values[0]
