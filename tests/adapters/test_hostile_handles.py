"""A handle from a message is checked before it is mapped (C72): the request fails, the worker lives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from adapters.arena import SharedMemory
from adapters.disk import DiskStore
from adapters.handle import BadHandle, BlockId, Handle
from adapters.segment import HEADER, MAGIC
from adapters.sweep import sweep
from tests.adapters.conftest import RUN

PLACE = f"omni-{RUN}-0123456789abcdef-0"


@pytest.fixture
def good(arena: SharedMemory, released: list[BlockId]) -> Iterator[Handle]:
    """A good handle, which is still good after the bad ones."""
    handle = arena.put(np.arange(100, dtype=np.float32))
    yield handle
    assert arena.get(handle, lambda block: None).sum() == 4950
    assert released == []


def refuse(arena: SharedMemory, handle: Handle, released: list[BlockId]) -> None:
    with pytest.raises(BadHandle):
        arena.get(handle, released.append)


@pytest.mark.parametrize(
    "place",
    [
        *("../x", "/etc/passwd", "a/b", "", "x" * 300, "omni\0x", ".", "..", "\ud800"),
        *(PLACE + "\n", PLACE + "/", PLACE, f"../omni-test/{PLACE}", f"omni-{RUN}-run"),
    ],
)
def test_names(place: str, arena: SharedMemory, good: Handle, released: list[BlockId]) -> None:
    block = msgspec.structs.replace(good.block, place=place)
    refuse(arena, msgspec.structs.replace(good, block=block), released)


@pytest.mark.parametrize("offset", [-1, 0, 63, 65, 4096, -(2**63), 2**63, 8 << 20, (8 << 20) - 64, 1 << 40])
def test_offsets(offset: int, arena: SharedMemory, good: Handle, released: list[BlockId]) -> None:
    block = msgspec.structs.replace(good.block, offset=offset)
    refuse(arena, msgspec.structs.replace(good, block=block), released)


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 404, "shape": (101,)},
        {"nbytes": 396, "shape": (99,)},
        {"nbytes": -400},
        {"nbytes": 1 << 40, "shape": (1 << 38,)},
        {"shape": (101,)},
        {"shape": (-100,)},
        {"shape": (-10, -10)},
        {"shape": (2**32, 2**32)},
        {"shape": (0, 2**62, 2**62), "nbytes": 0},
        {"shape": (1,) * 40 + (100,)},
        {"dtype": "float64"},
        {"dtype": "object"},
        {"dtype": "O"},
        {"dtype": "float32, float32"},
        {"dtype": "x" * 100_000},
    ],
)
def test_sizes_and_dtypes(
    change: dict[str, Any], arena: SharedMemory, good: Handle, released: list[BlockId]
) -> None:
    refuse(arena, msgspec.structs.replace(good, **change), released)


@pytest.mark.parametrize("generation", [0, 2, -1, 2**64])
def test_generations(generation: int, arena: SharedMemory, good: Handle, released: list[BlockId]) -> None:
    block = msgspec.structs.replace(good.block, generation=generation)
    refuse(arena, msgspec.structs.replace(good, block=block), released)


def test_freed_blocks_and_places_used_again(arena: SharedMemory, released: list[BlockId]) -> None:
    old = arena.put(np.zeros(100))
    arena.free(old.block)
    refuse(arena, old, released)
    new = arena.put(np.zeros(100))
    assert new.block.offset == old.block.offset
    refuse(arena, old, released)


def plant(path: Path, *, mode: int = 0o600) -> Handle:
    """A file that looks like a segment with one block of 64 bytes, and the handle of that."""
    path.write_bytes(HEADER.pack(MAGIC, 1, 64).ljust(64) + bytes(64))
    path.chmod(mode)
    return Handle("shm", BlockId(PLACE, 64, 1), 64, "uint8", (64,))


def test_links_devices_and_other_peoples_files(
    folder: Path, tmp_path: Path, arena: SharedMemory, released: list[BlockId]
) -> None:
    place = folder / PLACE
    handle = plant(place)
    assert arena.get(handle, lambda block: None).size == 64  # the control: a proper file is read
    arena.reader.forget()
    for mode in (0o666, 0o644, 0o620):
        place.chmod(mode)
        refuse(arena, handle, released)
    place.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(place, 12345, 12345)
        refuse(arena, handle, released)
    place.unlink()
    plant(tmp_path / "secret")
    place.symlink_to(tmp_path / "secret")
    refuse(arena, handle, released)
    place.unlink()
    os.mkfifo(place, 0o600)
    refuse(arena, handle, released)
    place.unlink()
    place.mkdir(0o700)
    refuse(arena, handle, released)
    place.rmdir()
    place.touch(0o600)
    refuse(arena, handle, released)
    place.unlink()


def test_a_file_that_was_cut_gives_an_error_not_a_signal(
    folder: Path, arena: SharedMemory, released: list[BlockId]
) -> None:
    place = folder / PLACE
    handle = plant(place)
    kept = arena.get(handle, lambda block: None)
    os.truncate(place, 0)
    refuse(arena, handle, released)
    del kept
    place.unlink()


def test_another_user_can_open_neither_arenas_nor_files(
    folder: Path, arena: SharedMemory, fork: Callable[[Callable[[], None]], int]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    folder.chmod(0o755)  # else the folder alone would keep it out
    store = DiskStore(folder / "chunks")
    arena.store = store
    handle = arena.put(np.arange(100))
    place = store.put("request-0", memoryview(b"secret"))
    store.folder.chmod(0o755)
    (store.folder / "request-0").chmod(0o755)

    def stranger() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        assert set(os.listdir(folder)) == {"chunks", handle.block.place}
        for path in (folder / handle.block.place, store.folder / place):
            for flags in (os.O_RDONLY, os.O_WRONLY):
                with pytest.raises(PermissionError):
                    os.open(path, flags)
            with pytest.raises(PermissionError):
                path.unlink()
        with pytest.raises(BadHandle, match="Permission denied"):
            SharedMemory(RUN).get(handle, lambda block: None)
        with pytest.raises(BadHandle, match="Permission denied"):
            DiskStore(store.folder).read(place, 6)
        assert sweep() == []

    assert os.waitstatus_to_exitcode(os.waitpid(fork(stranger), 0)[1]) == 0
    store.discard("request-0")
    store.close()
