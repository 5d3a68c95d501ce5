"""A run whose broker died keeps its segments: its workers may be alive, its journal may be there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from adapters.arena import SharedMemory
from adapters.sweep import Keep, RunLock, segments, sweep, sweep_run
from tests.adapters.conftest import RUN
from tests.adapters.test_sweep import Fork, dead_producer

OTHER = "0e1f" * 4


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.db"
    path.touch()
    return path


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def test_a_living_worker_keeps_the_segments_of_its_dead_mates(
    fork: Fork, arena: SharedMemory, folder: Path
) -> None:
    dead = dead_producer(fork)
    arena.put(np.zeros(10))
    assert {(item.owner_alive, item.run_state) for item in segments()} == {(True, "alive"), (False, "alive")}
    assert sweep() == []
    assert arena.get(dead, lambda block: None).sum() == 499500
    arena.close()
    assert [swept.name for swept in sweep()] == [dead.block.place]


def test_a_living_run_protects_no_other(fork: Fork, folder: Path) -> None:
    dead = dead_producer(fork)
    with SharedMemory(OTHER) as other:
        other.put(np.zeros(10))
        assert [swept.name for swept in sweep()] == [dead.block.place]
        assert len(segments()) == 1


def test_a_journal_keeps_the_segments_of_a_run_that_nobody_runs(
    fork: Fork, folder: Path, journal: Path
) -> None:
    dead = dead_producer(fork)
    keep = Keep(RUN, journal)
    assert [item.run_state for item in segments()] == ["kept"]
    assert sweep() == []
    with SharedMemory(RUN) as reader:
        assert reader.get(dead, lambda block: None).sum() == 499500
    keep.close()
    keep.close()
    assert [swept.name for swept in sweep()] == [dead.block.place]
    assert names(folder) == set()


def test_a_journal_that_was_removed_keeps_nothing(fork: Fork, folder: Path, journal: Path) -> None:
    dead = dead_producer(fork)
    Keep(RUN, journal)
    journal.unlink()
    assert [item.run_state for item in segments()] == ["dead"]
    assert [swept.name for swept in sweep()] == [dead.block.place]
    assert names(folder) == set()  # the link goes too


def test_the_link_of_a_living_run_stays_also_without_a_journal(folder: Path, journal: Path) -> None:
    journal.unlink()
    lock, keep = RunLock(RUN), Keep(RUN, journal)
    assert sweep() == []
    assert sweep(kept=True) == []
    assert f"omni-{RUN}-kept" in names(folder)
    keep.close()
    lock.close()


def test_one_journal_keeps_one_run(fork: Fork, folder: Path, journal: Path) -> None:
    """A broker that had to start a new journal in the same place leaves no run kept for ever."""
    dead = dead_producer(fork)
    Keep(RUN, journal)
    again = Keep(OTHER, journal)
    assert [swept.name for swept in sweep()] == [dead.block.place]
    assert names(folder) == {f"omni-{OTHER}-kept"}
    again.close()


def test_a_broker_that_comes_back_keeps_its_run_by_its_new_journals_path(
    folder: Path, journal: Path, tmp_path: Path
) -> None:
    Keep(RUN, journal)
    Keep(RUN, journal)
    moved = tmp_path / "moved.db"
    journal.rename(moved)
    keep = Keep(RUN, moved)
    assert os.readlink(folder / f"omni-{RUN}-kept") == str(moved)
    keep.close()


def test_force_takes_kept_runs_but_no_living_ones(fork: Fork, folder: Path, journal: Path) -> None:
    dead = dead_producer(fork)
    Keep(RUN, journal)
    with SharedMemory(OTHER) as other:
        other.put(np.zeros(10))
        assert [swept.name for swept in sweep(kept=True)] == [dead.block.place]
        assert len(names(folder)) == 1
    assert journal.exists()


def test_files_that_look_like_links_of_ours_keep_nothing(fork: Fork, folder: Path, journal: Path) -> None:
    dead = dead_producer(fork)
    link = folder / f"omni-{RUN}-kept"
    link.write_text(str(journal))
    assert [item.run_state for item in segments()] == ["dead"]
    link.unlink()
    if os.geteuid() == 0:
        link.symlink_to(journal)
        os.chown(link, 12345, 12345, follow_symlinks=False)
        assert [item.run_state for item in segments()] == ["dead"]
    assert [swept.name for swept in sweep()] == [dead.block.place]
    link.unlink(missing_ok=True)


@pytest.mark.parametrize("run", ["", "../x", RUN + "\n", "5EED" * 4])
def test_a_run_is_named_by_hex_digits(run: str, journal: Path) -> None:
    with pytest.raises(ValueError, match="hex"):
        Keep(run, journal)


def test_a_restarted_broker_sweeps_the_dead_arenas_that_nobody_needs(
    fork: Fork, arena: SharedMemory, folder: Path
) -> None:
    arena.put(np.zeros(10))
    needed, unneeded = dead_producer(fork), dead_producer(fork)
    with SharedMemory(OTHER) as other:
        other.put(np.zeros(10))
        prefix = needed.block.place.rpartition("-")[0] + "-"
        lock = RunLock(RUN)
        assert [swept.name for swept in sweep_run(RUN, {prefix})] == [unneeded.block.place]
        assert sweep_run(RUN, {prefix}) == []
        assert arena.get(needed, lambda block: None).sum() == 499500
        assert [swept.name for swept in sweep_run(RUN, set())] == [needed.block.place]
        assert len(segments()) == 2  # living owners' segments stay, and other runs'
        lock.close()
