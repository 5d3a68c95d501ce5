"""The block allocator against a model of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.allocator import ALIGNMENT, Allocator, aligned

SIZE = 64 * ALIGNMENT


@settings(max_examples=300)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, SIZE // 3)), max_size=120))
def test_blocks_never_overlap_and_freed_neighbours_join(steps: list[tuple[bool, int]]) -> None:
    allocator = Allocator(SIZE)
    used: dict[int, int] = {}
    for take, number in steps:
        if take:
            size = aligned(max(number, 1))
            start = allocator.take(number)
            gaps = free_ranges(used)
            if start is None:
                assert max(gaps.values(), default=0) < size
            else:
                assert start % ALIGNMENT == 0
                # The lowest of the tightest gaps.
                assert start == min((room, at) for at, room in gaps.items() if room >= size)[1]
                used[start] = size
        elif used:
            start = sorted(used)[number % len(used)]
            allocator.give_back(start)
            del used[start]
        assert allocator.used == sum(used.values())
        assert allocator.largest == max(free_ranges(used).values(), default=0)
        assert allocator.empty == (not used)


def free_ranges(used: dict[int, int]) -> dict[int, int]:
    """start -> size of the gaps between used ranges."""
    gaps, at = {}, 0
    for start in sorted(used):
        if start > at:
            gaps[at] = start - at
        at = start + used[start]
    if at < SIZE:
        gaps[at] = SIZE - at
    return gaps


def test_double_free_is_an_error() -> None:
    allocator = Allocator(SIZE)
    start = allocator.take(1)
    assert start is not None
    allocator.give_back(start)
    with pytest.raises(KeyError):
        allocator.give_back(start)


@pytest.mark.parametrize("size", [0, -64, 63])
def test_odd_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        Allocator(size)
