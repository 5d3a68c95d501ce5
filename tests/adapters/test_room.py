"""What a process takes of shared memory follows the folder; a setting that can't hold is refused (C63)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adapters import room
from adapters.arena import SharedMemory
from adapters.chunk import pack_wait, unpack
from adapters.disk import DiskStore
from adapters.handle import ArenaFull
from adapters.room import NoRoom, ceiling, check_room
from tests.adapters.conftest import RUN

MIB = 1 << 20


def test_a_small_file_system_is_shared_and_a_large_one_is_not_taken_whole(
    tiny_tmpfs: Path, folder: Path
) -> None:
    assert ceiling(tiny_tmpfs) == MIB // 2
    assert SharedMemory(RUN, folder=tiny_tmpfs).ceiling == MIB // 2
    assert ceiling(folder) <= room.CEILING


def test_the_setting_wins(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("OMNI_SHM_MB", "3")
    check_room()
    with SharedMemory(RUN) as arena:
        assert arena.ceiling == 3 * MIB
        with pytest.raises(ArenaFull, match="OMNI_SHM_MB"):
            arena.put(np.zeros(3 * MIB, np.uint8))


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "1e3", "64m", "nan"])
def test_a_setting_that_is_no_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_SHM_MB", text)
    with pytest.raises(NoRoom, match=f"OMNI_SHM_MB is '{text}'"):
        check_room()
    with pytest.raises(NoRoom):
        SharedMemory(RUN)


def test_a_setting_over_the_file_system_is_refused_with_the_cure(
    tiny_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_room(tiny_tmpfs)
    monkeypatch.setenv("OMNI_SHM_MB", "64")
    with pytest.raises(NoRoom, match=r"has 1 MiB.*OMNI_SHM_MB lower.*OMNI_SHM_DIR.*--shm-size=64m"):
        check_room(tiny_tmpfs)
    monkeypatch.setenv("OMNI_SHM_MB", "1")
    check_room(tiny_tmpfs)


def test_an_absent_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoRoom, match=r"absent.*OMNI_SHM_DIR"):
        check_room(tmp_path / "absent")
    assert ceiling(tmp_path / "absent") == room.CEILING


async def test_a_payload_many_times_the_file_system_goes_to_disk(tiny_tmpfs: Path, folder: Path) -> None:
    store = DiskStore(folder / "chunks")
    with SharedMemory(RUN, folder=tiny_tmpfs, store=store) as arena:
        chunk = await pack_wait({"x": np.ones(100 * MIB, np.uint8)}, 0, arena, name="request-0")
        assert unpack(chunk, arena, lambda block: None)["x"].sum() == 100 * MIB
        arena.free(chunk.handles[0].block)
    store.close()
