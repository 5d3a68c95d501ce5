"""Attention of transformers' decoders over paged keys and values.

Rows of many jobs come packed, [1, heads, T, head_dim]: first the single rows of jobs that write (one each),
then the pieces of prompts. The decoder's attention layers call :func:`paged_attention` through transformers'
AttentionInterface, and it finds its step through the keyword ``cache``.

Single rows are computed block by block, for all jobs at once: the scores of a block's rows for the query of
the job that owns it, a softmax over the blocks of each job put together from its blocks' maxima and sums (as
in flash-decoding: Dao et al., 2023), and the same for the values. Blocks lie in memory as the allocator gave
them out, so where most of the first ``n`` are wanted, these are read in place, with no copy. Copying them
together first, into one padded tensor, took 3 to 30 times as long on a CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from workers.engines.ar.family import Layout
from workers.engines.ar.schedule import Piece

NAME = "omni_pages"
_LEAST = -1e30  # below any score, yet finite: exp(-inf - _LEAST) is 0, exp(-inf + inf) is NaN
_DENSE = 0.4  # blocks are read in place where at least this share of the range is wanted


class Pages:
    """The key-value memory, allocated once.

    Values are [layers, blocks, kv_heads, size, head_dim]. Keys have their last two axes swapped: then both
    products of attention are of matrices as they lie, 1.6 times as fast on a CPU as with the keys transposed.
    """

    def __init__(self, layout: Layout, blocks: int, size: int, device: torch.device) -> None:
        # One block more than there are to have, for the rows of nobody that fill up a captured batch.
        shape = (layout.layers, blocks + 1, layout.kv_heads)
        self.scratch = blocks
        # Zeros, since what nobody wrote is multiplied by zero, and zero times NaN is NaN.
        self.keys = torch.zeros(*shape, layout.head_dim, size, dtype=layout.dtype, device=device)
        self.values = torch.zeros(*shape, size, layout.head_dim, dtype=layout.dtype, device=device)
        self.size = size
        self.device = device

    @staticmethod
    def bytes_per_block(layout: Layout, size: int) -> int:
        """Bytes of keys and values of all layers in one block."""
        width = int(layout.dtype.itemsize) * layout.head_dim
        return 2 * layout.layers * layout.kv_heads * size * width

    def wipe(self, blocks: list[int]) -> None:
        """Zeroes blocks that a job with NaN leaves behind."""
        self.keys[:, blocks] = 0
        self.values[:, blocks] = 0


class _Prompt(NamedTuple):
    """A piece of a prompt: packed rows ``first`` to ``last`` are the job's rows ``start`` to ``stop``."""

    first: int
    last: int
    start: int
    stop: int
    blocks: torch.Tensor


class PagedStep:
    """One step as attention sees it: where rows go, and whose blocks are read for whom.

    Args:
        pages: The memory.
        pieces: Single rows first. Their blocks are there.
    """

    def __init__(self, pages: Pages, pieces: list[Piece]) -> None:
        self._pages = pages
        size = pages.size
        singles = [piece for piece in pieces if piece.stop - piece.start == 1]
        self.singles = len(singles)
        self.alone = len(singles) == 1
        blocks: list[np.ndarray[Any, Any]] = []
        places: list[np.ndarray[Any, Any]] = []
        self.prompts: list[_Prompt] = []
        at = 0
        for piece in pieces:
            rows = np.arange(piece.start, piece.stop)
            table = np.asarray(piece.sequence.blocks)
            blocks.append(table[rows // size])
            places.append(rows % size)
            if len(rows) > 1:
                used = self._tensor(table[: -(-piece.stop // size)])
                self.prompts.append(_Prompt(at, at + len(rows), piece.start, piece.stop, used))
            at += len(rows)
        self._biases: dict[int | None, torch.Tensor] = {}
        self.own: torch.Tensor | None = None
        if pieces:
            self.block = self._tensor(np.concatenate(blocks))  #: int [T], where each row goes, and
            self.place = self._tensor(np.concatenate(places))  #: int [T], its place in there
        if singles:
            self._own(singles)

    def _own(self, singles: list[Piece]) -> None:
        """Which blocks are read, and who owns them: row ``self.singles`` stands for nobody."""
        size = self._pages.size
        end = 1 + max(max(piece.sequence.blocks) for piece in singles)
        owner = np.full(end, self.singles)
        base = np.zeros(end, np.int64)  # the owner's row that the block begins with
        rows = np.zeros(self.singles + 1, np.int64)
        for number, piece in enumerate(singles):
            table = piece.sequence.blocks[: -(-piece.stop // size)]
            owner[table] = number
            base[table] = np.arange(len(table)) * size
            rows[number] = piece.stop
        wanted = np.flatnonzero(owner < self.singles)
        dense = self._pages.device.type == "cpu" and len(wanted) >= _DENSE * end
        read = slice(0, end) if dense else wanted
        self.read: slice | torch.Tensor = slice(0, end) if dense else self._tensor(wanted)
        #: int, where only the one job's blocks are to count: others may hold NaN, which no weight takes away
        self.own = self._tensor(wanted) if self.alone and dense and len(wanted) < end else None
        self.owner = self._tensor(owner[read])  #: int [N]
        self.base = self._tensor(base[read])  #: int [N]
        self.length = self._tensor(rows[owner[read]])  #: int [N], rows of the owner

    @classmethod
    def padded(cls, pages: Pages, singles: int, blocks: int) -> PagedStep:
        """A step of nobody's rows, of fixed sizes; :meth:`fill` brings a real one in."""
        step = cls(pages, [])
        step.singles = singles
        step.block, step.place = (torch.zeros(singles, dtype=torch.long, device=pages.device) for _ in "12")
        step.owner, step.base, step.length, step.read = (
            torch.zeros(blocks, dtype=torch.long, device=pages.device) for _ in "1234"
        )
        step.alone = False  # it may be nobody's
        step.block.fill_(pages.scratch)
        step.owner.fill_(singles)
        return step

    def fill(self, step: PagedStep) -> None:
        """Takes over a step that is no larger, in place."""
        rows, blocks = step.singles, len(step.owner)
        self.block.fill_(self._pages.scratch)
        self.block[:rows] = step.block
        self.place[:rows] = step.place
        self.owner.fill_(self.singles)  # nobody
        self.owner[:blocks] = step.owner.masked_fill(step.owner == rows, self.singles)
        self.length.zero_()
        self.base[:blocks] = step.base
        self.length[:blocks] = step.length
        read = torch.arange(blocks) if isinstance(step.read, slice) else step.read
        torch.as_tensor(self.read)[:blocks] = read

    def forget_biases(self) -> None:
        """The next pass computes them from what the step holds then."""
        self._biases.clear()

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._pages.device)

    def bias(self, window: int | None) -> torch.Tensor:
        """[N, 1, 1, size]: 0 for rows that the owner's query sees, else -inf. The same for all layers."""
        if window not in self._biases:
            row = self.base[:, None] + torch.arange(self._pages.size, device=self._pages.device)
            seen = row < self.length[:, None]
            if window is not None:
                seen &= row >= self.length[:, None] - window
            bias = torch.zeros_like(row, dtype=torch.float32).masked_fill_(~seen, -torch.inf)
            self._biases[window] = bias[:, None, None]
        return self._biases[window]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Rows [T, kv_heads, head_dim] into their places."""
        self._pages.keys[layer][self.block, :, :, self.place] = keys
        self._pages.values[layer][self.block, :, self.place] = values

    def of_singles(self, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """Query [D, heads, head_dim] -> the same shape."""
        keys, values = self._read(self._pages.keys[layer]), self._read(self._pages.values[layer])
        if self.alone:
            return self._of_one(keys, values, query, scale, window)
        count, heads, width = query.shape
        grouped = (query * scale).view(count, keys.shape[1], -1, width)  # [D, kv_heads, group, head_dim]
        # Nobody's blocks are read with somebody's query; their scores are -inf all the same.
        asked = grouped.index_select(0, self.owner.clamp(max=count - 1))
        scores = torch.matmul(asked, keys).float() + self.bias(window)
        best = scores.new_full((count + 1, *grouped.shape[1:3], 1), _LEAST)
        highest = scores.amax(-1, keepdim=True)
        best.scatter_reduce_(0, self.owner[:, None, None, None].expand_as(highest), highest, "amax")
        weights = torch.exp(scores - best[self.owner])
        sums = torch.zeros_like(best).index_add_(0, self.owner, weights.sum(-1, keepdim=True))
        mixed = torch.matmul(weights.to(values.dtype), values).float()
        out = mixed.new_zeros((count + 1, *mixed.shape[1:])).index_add_(0, self.owner, mixed)
        # A job's sum is at least 1, for its highest score. Rows of nobody become 0 and not NaN.
        return (out[:count] / sums[:count].clamp_min_(1)).to(query.dtype).view(count, heads, width)

    def _of_one(
        self, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """The same where there is one job: its softmax is over all its blocks. Half as many operations."""
        grouped = (query * scale).view(1, keys.shape[1], -1, query.shape[2])
        scores = torch.matmul(grouped, keys).float().add_(self.bias(window))
        weights = scores.sub_(self._of_own(scores).amax((0, 3), keepdim=True)).exp_()
        mixed = self._of_own(torch.matmul(weights.to(values.dtype), values).float()).sum(0)
        return mixed.div_(self._of_own(weights).sum((0, 3))[..., None]).to(query.dtype).view(query.shape)

    def _of_own(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks if self.own is None else blocks.index_select(0, self.own)

    def _read(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.read] if isinstance(self.read, slice) else memory.index_select(0, self.read)

    def of_prompt(
        self, layer: int, prompt: _Prompt, query: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Query [heads, rows, head_dim] -> [rows, heads, head_dim]."""
        keys = self._gathered(self._pages.keys[layer].transpose(2, 3), prompt)
        values = self._gathered(self._pages.values[layer], prompt)
        mask = None
        if prompt.start or window is not None:
            row = torch.arange(prompt.start, prompt.stop, device=query.device)[:, None]
            seen = torch.arange(prompt.stop, device=query.device)
            mask = seen <= row
            if window is not None:
                mask &= seen > row - window
        out = functional.scaled_dot_product_attention(
            query[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[0] != keys.shape[0],
        )
        return out[0].transpose(0, 1)

    @staticmethod
    def _gathered(memory: torch.Tensor, prompt: _Prompt) -> torch.Tensor:
        """[kv_heads, rows, head_dim] of a job's blocks."""
        return memory.index_select(0, prompt.blocks).transpose(0, 1).flatten(1, 2)[:, : prompt.stop]


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cache: PagedStep,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What a decoder's attention layer calls: [1, heads, T, head_dim] -> [1, T, heads, head_dim].

    Raises NotImplementedError for kinds of attention that it would compute wrongly.
    """
    if others.get("softcap") is not None or others.get("s_aux") is not None:
        raise NotImplementedError("attention with soft-capped scores or sinks")
    layer = module.layer_idx
    cache.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    parts = []
    if cache.singles:
        rows = query[0, :, : cache.singles].transpose(0, 1)
        parts.append(cache.of_singles(layer, rows, scaling, sliding_window))
    for prompt in cache.prompts:
        rows = query[0, :, prompt.first : prompt.last]
        parts.append(cache.of_prompt(layer, prompt, rows, scaling, sliding_window))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[None], None


def use_pages(decoder: Any) -> Any:
    """Makes a transformers decoder (or a model with one) read and write paged memory; returns it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
    decoder.set_attn_implementation(NAME)
    return decoder
