"""Beginnings that prompts have in common, computed once.

System prompts, and conversations that go on, begin as prompts before them did. Whole blocks of a prompt's
rows are kept with their keys, values and hidden states, each under a digest of what it and all rows before it
were computed from, and a later prompt that begins the same takes them over.

They have a memory of their own and are copied out of it and into it. So each job still owns its blocks alone,
and the blocks in use lie close together, which attention relies on (:mod:`workers.engines.ar.attention`). A
copied row costs a thousandth of a computed one.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from workers.engines.ar.attention import Pages
from workers.engines.ar.family import Layout, Prompt
from workers.engines.ar.sequence import Sequence
from workers.engines.engine_thread import is_fatal

log = logging.getLogger("engine")


class _Kept(NamedTuple):
    slot: int
    hidden: dict[int, torch.Tensor]  #: layer -> [size, hidden], on the CPU


class Prefixes:
    """The blocks that are kept; those not wanted for the longest time make room. On the engine's thread.

    Args:
        pages: The jobs' memory.
        slots: How many blocks may be kept, at least one.
        layers: Whose hidden states jobs hand on.
    """

    def __init__(self, layout: Layout, pages: Pages, slots: int, layers: list[int]) -> None:
        self._pages = pages
        self._shelf = Pages(layout, slots, pages.size, pages.device)
        self._slots = slots
        self._layers = layers
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # those not wanted for the longest time first

    def restore(self, one: Sequence) -> None:
        """Gives a job that has its memory, and nothing in it yet, the rows that are known.

        The last row of a prompt is always left, since the first token is made from it.
        """
        with self._harmless():
            self._restore(one)

    def coming(self, one: Sequence, others: list[Sequence]) -> bool:
        """Whether one of the others is about to be kept and has at least half of what this one has to read.

        That is worth waiting for: the others are older, so their rows are computed first anyway.
        """
        names, size = self._restorable(one), self._pages.size
        known = self._known(names)
        half = known + -(-(one.prompt_rows - known * size) // (2 * size)) - 1  # the last block of it
        if half >= len(names):
            return False
        return any(
            other.computed < other.prompt_rows
            and not other.codes
            and self._names(other)[: self._slots][half : half + 1] == [names[half]]
            for other in others
        )

    def _restore(self, one: Sequence) -> None:
        names = self._restorable(one)
        known = self._known(names)
        if not known:
            return
        self._touch(names[:known])
        found = [self._kept[name] for name in names[:known]]
        self._copy(self._shelf, [kept.slot for kept in found], self._pages, one.blocks[:known])
        stop = known * self._pages.size
        if one.handed_out < stop:
            hidden = {layer: torch.cat([kept.hidden[layer] for kept in found]) for layer in self._layers}
            for layer, rows in hidden.items():
                one.held.setdefault(layer, []).append(rows[one.handed_out :])
            one.handed_out = stop
        one.computed = stop

    def keep(self, one: Sequence, hidden: Mapping[int, torch.Tensor]) -> None:
        """Remembers the prompt of a job that has just read it.

        ``hidden``: layer -> [n, hidden] of the prompt's rows; of a job whose earlier attempt has handed them
        out there are none, and then nothing is kept.
        """
        with self._harmless():
            self._keep(one, hidden)

    def _keep(self, one: Sequence, hidden: Mapping[int, torch.Tensor]) -> None:
        if any(len(hidden[layer]) < one.prompt_rows for layer in self._layers):
            return
        size, names = self._pages.size, self._names(one)[: self._slots]
        self._touch([name for name in names if name in self._kept])
        new = {name: number for number, name in enumerate(names) if name not in self._kept}
        slots = list(range(len(self._kept), min(len(self._kept) + len(new), self._slots)))
        while len(slots) < len(new):
            slots.append(self._kept.popitem(last=False)[1].slot)
        self._copy(self._pages, [one.blocks[number] for number in new.values()], self._shelf, slots)
        for (name, number), slot in zip(new.items(), slots, strict=True):
            rows = slice(number * size, (number + 1) * size)
            self._kept[name] = _Kept(slot, {layer: hidden[layer][rows].clone() for layer in self._layers})
        self._touch(names)

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Where there is no memory for a copy, say, a job goes on without: this would only have saved time.

        Its token may be made already, so it must not be computed again. Nobody knows then which blocks are
        whole, so all are forgotten.
        """
        try:
            yield
        except Exception as error:
            if is_fatal(error):
                raise
            log.warning("beginnings of prompts can't be copied, so none are known now", exc_info=True)
            self._kept.clear()

    def _touch(self, names: list[bytes]) -> None:
        """These are wanted. The first of them goes last: without it the others could not be found."""
        for name in reversed(names):
            self._kept.move_to_end(name)

    def _known(self, names: list[bytes]) -> int:
        """How many there are of these, in a row from the first."""
        known = 0
        while known < len(names) and names[known] in self._kept:
            known += 1
        return known

    def _restorable(self, one: Sequence) -> list[bytes]:
        """Of all whole blocks but one that ends with the prompt."""
        return self._names(one)[: (one.prompt_rows - 1) // self._pages.size]

    def _names(self, one: Sequence) -> list[bytes]:
        """Of the prompt's whole blocks."""
        if one.block_names is None:
            one.block_names = names_of(one.prompt, self._pages.size)
        return one.block_names

    @staticmethod
    def _copy(source: Pages, taken: list[int], target: Pages, given: list[int]) -> None:
        if taken:
            target.keys[:, given] = source.keys[:, taken]
            target.values[:, given] = source.values[:, taken]


def names_of(prompt: Prompt, size: int) -> list[bytes]:
    """A digest for each whole block of ``size`` rows: of all that the block's keys and values depend on.

    These are the rows' embeddings (or tokens, which decide them), positions and extras, and all of the same
    of the rows before.
    """
    if prompt.rows < size:
        return []
    ids = torch.tensor(prompt.ids) if prompt.embeds is None else prompt.embeds
    sources = {str(ids.dtype): ids} | {f"extra {name}": rows for name, rows in sorted(prompt.extras.items())}
    if prompt.positions is not None:
        sources["positions"] = prompt.positions.t()
    flat = [(name.encode(), _bytes(rows), len(rows)) for name, rows in sources.items()]
    digest = hashlib.blake2b(digest_size=16)
    names = []
    for number in range(prompt.rows // size):
        for name, data, rows in flat:
            width = len(data) // rows
            digest.update(name)
            digest.update(data[number * size * width : (number + 1) * size * width])
        names.append(digest.digest())
    return names


def _bytes(rows: torch.Tensor) -> memoryview:
    return memoryview(rows.cpu().flatten().view(torch.uint8).numpy())
