"""A block is held as long as any view of its tensor, and released once (C42, C45)."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.arena import SharedMemory
from adapters.handle import BlockId
from adapters.reader import Reader
from tests.adapters.conftest import RUN, open_fds

torch = pytest.importorskip("torch")

VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda array: array,
    "slice": lambda array: array[1:],
    "slice of a slice": lambda array: array[1:][::2][1:],
    "reshape": lambda array: array.reshape(2, -1).T,
    "flat": lambda array: array.ravel()[3:],
    "other dtype": lambda array: array.view(np.uint8)[5:],
    "memoryview": lambda array: memoryview(array[2:]),
    "of a memoryview": lambda array: np.asarray(memoryview(array))[1:],
    "torch": torch.from_numpy,
    "slice in torch": lambda array: torch.from_numpy(array[1:]).view(torch.uint8)[1:],
    "dlpack free": lambda array: torch.as_tensor(array)[2:],
    "iterator": iter,
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", VIEWS)
def test_the_last_view_of_any_kind_releases_once(
    name: str, arena: SharedMemory, released: list[BlockId]
) -> None:
    handle = arena.put(np.arange(100.0))
    root = arena.get(handle, released.append)
    view = VIEWS[name](root)
    del root
    gc.collect()
    assert released == []
    del view
    gc.collect()
    assert released == [handle.block]


def test_torch_only_dtypes_release_too(arena: SharedMemory, released: list[BlockId]) -> None:
    handle = arena.put(torch.randn(100).to(torch.bfloat16))
    view = arena.get(handle, released.append)[10:].view(torch.int16)[1:]
    assert released == []
    del view
    assert released == [handle.block]


def test_each_get_releases_for_itself(arena: SharedMemory, released: list[BlockId]) -> None:
    handle = arena.put(np.zeros(100))
    first = arena.get(handle, released.append)
    second = arena.get(handle, released.append)
    del first
    assert released == [handle.block]
    del second
    assert released == [handle.block] * 2


def test_views_outlive_their_segment_and_their_reader(released: list[BlockId]) -> None:
    owner, reader = SharedMemory(RUN), SharedMemory(RUN)
    view = reader.get(owner.put(np.arange(1000)), released.append)
    owner.close()
    reader.close()
    del owner, reader
    gc.collect()
    assert view.sum() == 499500
    del view
    assert len(released) == 1


def test_file_descriptors_stay_flat_over_many_gets_with_views_kept(arena: SharedMemory) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_fds() + 20, hard))
    try:
        handle = arena.put(np.arange(100.0))
        kept: list[Any] = []
        for number in range(2000):
            view = arena.get(handle, lambda block: None)
            kept.append(memoryview(view[number % 50 :]))
            del view
        before = open_fds()
        kept.clear()
        assert open_fds() == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_file_descriptors_stay_flat_over_many_segments(folder: Path, released: list[BlockId]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_fds() + 40, hard))
    reader = Reader(folder, kept=8)
    try:
        for number in range(2000):
            with SharedMemory(RUN, first_segment=4096) as arena:
                view = reader.get(arena.put(np.full(10, number)), released.append)
                assert view[0] == number
            del view
            assert reader.mappings <= 8
        assert len(released) == 2000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_idle_mappings_are_bounded_and_go_with_their_files(folder: Path) -> None:
    reader = Reader(folder, kept=3)
    arenas = [SharedMemory(RUN, first_segment=4096) for _ in range(6)]
    handles = [arena.put(np.zeros(10)) for arena in arenas]
    views = [reader.get(handle, lambda block: None) for handle in handles]
    assert reader.mappings == 6  # the views need them
    again = reader.get(handles[0], lambda block: None)
    assert reader.mappings == 6  # evicted, but not mapped twice
    del views, again
    gc.collect()
    assert reader.mappings == 3
    for arena in arenas:
        arena.close()
    reader.trim()
    assert reader.mappings == 0


def test_a_reader_that_leaves_takes_nothing_away(
    arena: SharedMemory, released: list[BlockId], fork: Callable[[Callable[[], None]], int]
) -> None:
    handle = arena.put(np.arange(1000))

    def attach_and_leave() -> None:
        with SharedMemory(RUN) as other:
            assert other.get(handle, lambda block: None).sum() == 499500

    for _ in range(2):
        assert os.waitstatus_to_exitcode(os.waitpid(fork(attach_and_leave), 0)[1]) == 0
    assert arena.get(handle, released.append).sum() == 499500
