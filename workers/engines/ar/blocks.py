"""Blocks of the key-value memory: which are free."""

from __future__ import annotations

import heapq


class Blocks:
    """Hands out block numbers 0..total-1, the lowest free ones first.

    Lowest first, so that the used ones lie close together: attention then reads them in place (see
    :mod:`workers.engines.ar.attention`).
    """

    def __init__(self, total: int, size: int) -> None:
        self.total = total
        self.size = size  #: rows of one block
        self._free = list(range(total))  # a heap

    @property
    def free(self) -> int:
        """How many there are to have."""
        return len(self._free)

    def needed(self, rows: int) -> int:
        """How many hold so many rows of one job."""
        return -(-rows // self.size)

    def take(self, count: int) -> list[int]:
        """The caller has seen that there are so many."""
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        """They are free."""
        for block in blocks:
            heapq.heappush(self._free, block)
