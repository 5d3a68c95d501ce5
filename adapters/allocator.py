"""Which parts of a segment are in use: best fit, with neighbours joined when they are freed.

Only offsets live here, no memory, so that the allocator can be tested by itself. Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGNMENT = 64  #: a cache line, and the widest vector register


def aligned(size: int) -> int:
    """Rounds a size up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Allocator:
    """Hands out aligned ranges of ``[0, size)``."""

    def __init__(self, size: int) -> None:
        if size <= 0 or size % ALIGNMENT:
            raise ValueError(f"size {size} is no positive multiple of {ALIGNMENT}")
        self.size = size
        self._by_size = [(size, 0)]  # free ranges, sorted: the best fit is found by bisection
        self._starts = {0: size}  # free ranges: start -> size
        self._ends = {size: 0}  # free ranges: end -> start
        self._used: dict[int, int] = {}  # start -> size

    @property
    def largest(self) -> int:
        """The size of the largest free range."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return sum(self._used.values())

    @property
    def empty(self) -> bool:
        """Whether nothing is handed out."""
        return not self._used

    def take(self, size: int) -> int | None:
        """The start of a range of at least ``size`` bytes, the lowest of the best-fitting ones, or None.

        A range that was just freed and fits is taken again first, so hot pages stay hot.
        """
        size = aligned(max(size, 1))
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        room, start = self._by_size[at]
        self._remove(start, room)
        if room > size:
            self._add(start + size, room - size)
        self._used[start] = size
        return start

    def give_back(self, start: int) -> None:
        """Frees the range that starts here. Raises KeyError when none does."""
        size = self._used.pop(start)
        if (after := self._starts.get(start + size)) is not None:
            self._remove(start + size, after)
            size += after
        if (before := self._ends.get(start)) is not None:
            self._remove(before, start - before)
            start, size = before, size + start - before
        self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._starts[start] = size
        self._ends[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._starts[start]
        del self._ends[start + size]
