"""A killed host's files on disk go when their run is over, and not before."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from adapters.arena import SharedMemory
from adapters.disk import DiskStore
from adapters.sweep import RunLock
from tests.house import empty_house
from workers.old_chunks import UNTOUCHED_S, sweep_chunks

RUN, OTHER = "0ddc0ffee0ddf00d", "0123456789abcdef"
DAY_S = 24 * 3600


def left(state: Path, run: str, age_s: float) -> Path:
    """What a run has left that was killed so long ago."""
    folder = state / f"chunks-{run}"
    DiskStore(folder).put("request-1", memoryview(bytes(1000)))
    then = time.time() - age_s
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then))
    return folder


@pytest.fixture
def state(leaves_nothing: Path) -> Path:
    return leaves_nothing / "state"


@pytest.fixture
def shm(leaves_nothing: Path) -> Path:
    return leaves_nothing / "shm"


def test_chunks_of_a_run_that_is_over_go(state: Path, shm: Path) -> None:
    old = left(state, RUN, UNTOUCHED_S + DAY_S)
    assert sweep_chunks(state, shm) == [old]
    assert list(state.iterdir()) == []


def test_chunks_that_a_restarted_hosts_broker_may_count_on_stay(state: Path, shm: Path) -> None:
    """Nobody of the run is here yet: another run's guardian was faster."""
    folder = left(state, RUN, UNTOUCHED_S - DAY_S)
    assert sweep_chunks(state, shm) == []
    DiskStore(folder).discard("request-1")
    DiskStore(folder).close()


def test_a_file_of_today_keeps_an_old_folder(state: Path, shm: Path) -> None:
    folder = left(state, RUN, UNTOUCHED_S + DAY_S)
    DiskStore(folder).put("request-2", memoryview(bytes(1000)))
    assert sweep_chunks(state, shm) == []
    DiskStore(folder).sweep(set())
    DiskStore(folder).close()


def test_chunks_of_a_run_that_somebody_here_works_for_stay_however_old(state: Path, shm: Path) -> None:
    by_guardian, by_engine = (left(state, run, UNTOUCHED_S + DAY_S) for run in (RUN, OTHER))
    with closing(RunLock(RUN, shm)), SharedMemory(OTHER, folder=shm) as arena:
        arena.put(np.zeros(10_000))
        assert sweep_chunks(state, shm) == []
    assert set(sweep_chunks(state, shm)) == {by_guardian, by_engine}


def test_nothing_else_in_the_state_folder_is_touched(state: Path, shm: Path) -> None:
    then = time.time() - 10 * UNTOUCHED_S
    others = [state / "chunks", state / "chunks-of-mine", state / f"chunks-{RUN}.bak"]
    for other in others:
        other.mkdir()
        os.utime(other, (then, then))
    (state / f"chunks-{RUN}").symlink_to(others[0])
    assert sweep_chunks(state, shm) == []
    assert all(other.is_dir() for other in others)
    (state / f"chunks-{RUN}").unlink()


def test_a_guardian_that_starts_removes_them() -> None:
    with empty_house() as home:
        old = left(home.state_dir, RUN, UNTOUCHED_S + DAY_S)
        home.start("--pipeline", "echo")
        home.until(lambda: not old.exists())
        home.until(lambda: f"removed {old}" in home.log)
