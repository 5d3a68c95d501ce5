"""The owner's side of shared memory: growing, ceilings, waiting, threads, forks, files."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.arena import SharedMemory
from adapters.chunk import Chunk, Payload, pack, pack_wait
from adapters.handle import AdapterError, ArenaFull, BadHandle, BlockId, Handle
from adapters.segment import SEGMENT
from tests.adapters.conftest import RUN

MIB = 1 << 20


def small(**options: int) -> SharedMemory:
    """Four MiB in segments of one."""
    return SharedMemory(RUN, **{"ceiling": 4 * MIB, "first_segment": MIB, **options})


def test_no_file_is_made_before_the_first_tensor(folder: Path) -> None:
    with SharedMemory(RUN) as arena:
        assert os.listdir(folder) == []
        arena.put(np.zeros(10))
        assert len(os.listdir(folder)) == 1
    assert os.listdir(folder) == []


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_files_are_private_whatever_the_umask(umask: int, arena: SharedMemory, folder: Path) -> None:
    before = os.umask(umask)
    try:
        arena.put(np.zeros(10))
    finally:
        os.umask(before)
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert SEGMENT.fullmatch(file.name)
    assert file.name.startswith(arena.prefix)


def test_a_name_made_by_somebody_else_is_not_used(folder: Path) -> None:
    secret = folder / "secret"
    secret.write_bytes(b"precious")
    with SharedMemory(RUN, owner="0123456789abcdef") as arena:
        (folder / f"{arena.prefix}0").symlink_to(secret)
        with pytest.raises(AdapterError, match="File exists"):
            arena.put(np.zeros(10))
        arena.put(np.zeros(10))  # under the next name
    assert secret.read_bytes() == b"precious"
    (folder / f"{arena.prefix}0").unlink()
    secret.unlink()


@pytest.mark.parametrize(("run", "owner"), [("x", None), ("../../../../etc", None), (RUN, "a/b"), (RUN, "")])
def test_names_are_made_of_hex_digits(run: str, owner: str | None) -> None:
    if owner == "":
        assert SharedMemory(run, owner=owner).prefix.startswith(f"omni-{RUN}-")
        return
    with pytest.raises(ValueError, match="hex"):
        SharedMemory(run, owner=owner)


def test_space_is_used_again_so_a_steady_stream_never_grows(arena: SharedMemory) -> None:
    for _ in range(500):
        arena.free(arena.put(np.zeros(MIB, np.uint8)).block)
    assert arena.usage().bytes == 8 * MIB


def test_segments_grow_to_the_ceiling_and_then_the_arena_is_full() -> None:
    with small() as arena:
        handles: list[Handle] = []

        def fill() -> None:
            while True:
                handles.append(arena.put(np.zeros(100_000, np.uint8)))

        with pytest.raises(ArenaFull) as caught:
            fill()
        assert caught.value.retryable
        assert arena.usage().bytes == 4 * MIB
        assert len(handles) > 35
        arena.free(handles[7].block)
        arena.put(np.zeros(100_000, np.uint8))


def test_a_tensor_over_the_ceiling_is_refused_for_good() -> None:
    with small() as arena:
        with pytest.raises(ArenaFull) as caught:
            arena.put(np.zeros(4 * MIB, np.uint8))
        assert not caught.value.retryable
        assert arena.usage().segments == 0


def test_empty_small_segments_make_room_for_a_large_tensor() -> None:
    with small() as arena:
        handles = [arena.put(np.zeros(500_000, np.uint8)) for _ in range(6)]
        assert arena.usage().segments > 1
        for handle in handles:
            arena.free(handle.block)
        arena.put(np.zeros(3 * MIB, np.uint8))
        assert arena.usage().bytes <= 4 * MIB


def test_memory_of_a_segment_let_go_returns_though_a_reader_has_it_mapped(folder: Path) -> None:
    def pages(file_descriptor: int) -> int:
        return os.fstat(file_descriptor).st_blocks

    with SharedMemory(RUN) as reader:
        with small() as arena:
            handle = arena.put(np.ones(MIB // 2, np.uint8))
            view = reader.get(handle, lambda block: None)
            fd = os.open(folder / handle.block.place, os.O_RDONLY)
            del view
            arena.free(handle.block)
        assert reader.reader.mappings == 1  # cached still
        assert pages(fd) == 0
        os.close(fd)


def test_a_stale_or_unknown_free_is_counted_and_harmless(arena: SharedMemory) -> None:
    first = arena.put(np.zeros(10)).block
    arena.free(first)
    second = arena.put(np.ones(10))
    assert second.block.offset == first.offset
    arena.free(first)  # the same place, an earlier generation
    arena.free(BlockId("nowhere", 64, 1))
    arena.free(BlockId(first.place, 65, 2))
    usage = arena.usage()
    assert (usage.stale_frees, usage.blocks) == (3, 1)
    assert arena.get(second, lambda block: None)[0] == 1


def test_put_and_free_from_many_threads(arena: SharedMemory) -> None:
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            held = []
            for step in range(200):
                value = number * 1000 + step
                held.append((value, arena.put(np.full(1 + step * 7, value))))
                if len(held) > 5:
                    value, handle = held.pop(step % 5)
                    assert (arena.get(handle, lambda block: None) == value).all()
                    arena.free(handle.block)
            for _, handle in held:
                arena.free(handle.block)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert arena.usage()[2:] == (0, 0, 0)


def test_a_thread_waits_for_space() -> None:
    with small() as arena:
        handle = arena.put(np.zeros(3 * MIB, np.uint8))
        since = arena.frees
        assert not arena.wait_freed(since, 0.01)
        thread = threading.Thread(target=arena.free, args=[handle.block])
        thread.start()
        assert arena.wait_freed(since, 60)
        thread.join()
        assert arena.wait_freed(since, 0)  # a free in the past counts: no wake-up is lost


async def test_packing_waits_for_space_without_blocking_the_loop() -> None:
    with small() as arena:
        payload = {"frames": np.zeros(3 * MIB, np.uint8)}
        held = pack(payload, 0, arena)
        waiting = asyncio.create_task(pack_wait(payload, 1, arena, timeout_s=60))
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.to_thread(arena.free, held.handles[0].block)
        assert (await waiting).seq == 1
        with pytest.raises(ArenaFull, match=r"payload\.frames"):
            await pack_wait(payload, 2, arena, timeout_s=0.05)


async def test_chunks_that_fit_in_part_wait_without_blocking_the_loop_or_waking_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is put of them and taken back is no space that came free."""
    tries: list[int] = []

    def counted(payload: Payload, seq: int, *arguments: Any, **options: Any) -> Chunk:
        tries.append(seq)
        assert len(tries) < 100
        return pack(payload, seq, *arguments, **options)

    monkeypatch.setattr("adapters.chunk.pack", counted)
    with small() as arena:
        held = arena.put(np.zeros(2 * MIB, np.uint8))
        payload = {"first": np.zeros(MIB, np.uint8), "second": np.zeros(MIB, np.uint8)}
        waiting = [asyncio.create_task(pack_wait(payload, seq, arena, timeout_s=60)) for seq in range(3)]
        for _ in range(1000):
            await asyncio.sleep(0)
        assert arena.usage().blocks == 1
        arena.free(held.block)
        done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert arena.usage().blocks == 2 * len(done)
        assert arena.usage().stale_frees == 0
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


async def test_waiting_for_space_ends_when_the_arena_closes() -> None:
    arena = small()
    payload = {"frames": np.zeros(3 * MIB, np.uint8)}
    pack(payload, 0, arena)
    waiting = asyncio.create_task(pack_wait(payload, 1, arena, timeout_s=60))
    await asyncio.sleep(0)
    arena.close()
    with pytest.raises(AdapterError, match="closed"):
        await waiting


def test_close_twice_and_use_after_close(arena: SharedMemory) -> None:
    handle = arena.put(np.zeros(10))
    arena.close()
    arena.close()
    with pytest.raises(AdapterError, match="closed"):
        arena.put(np.zeros(10))
    with pytest.raises(BadHandle):
        arena.get(handle, lambda block: None)
    arena.free(handle.block)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with SharedMemory(RUN, folder=tmp_path / "absent") as arena, pytest.raises(AdapterError, match="absent"):
        arena.put(np.zeros(10))


def test_a_forked_child_can_neither_write_nor_remove_the_parents_arena(
    arena: SharedMemory, fork: Callable[[Callable[[], None]], int]
) -> None:
    handle = arena.put(np.ones(1000))

    def child() -> None:
        with pytest.raises(AdapterError):
            arena.put(np.zeros(1000))
        arena.free(handle.block)
        arena.close()

    assert os.waitstatus_to_exitcode(os.waitpid(fork(child), 0)[1]) == 0
    assert (arena.get(handle, lambda block: None) == 1).all()


def test_full_tmpfs_is_an_error_not_a_signal_and_works_again_with_space(tiny_tmpfs: Path) -> None:
    ballast = tiny_tmpfs / "ballast"
    with SharedMemory(RUN, folder=tiny_tmpfs, ceiling=1024 * MIB) as arena:
        with pytest.raises(ArenaFull, match="no space") as caught:
            arena.put(np.zeros(300 * MIB, np.uint8))
        assert caught.value.retryable
        ballast.write_bytes(bytes(MIB * 99 // 100 // 4096 * 4096))
        for _ in range(20):
            with pytest.raises(ArenaFull):
                arena.put(np.zeros(100_000, np.uint8))
        assert os.listdir(tiny_tmpfs) == ["ballast"]  # a failed put leaves no file
        ballast.unlink()
        # A usual first segment doesn't fit, but what the tensor needs does.
        handle = arena.put(np.ones(100_000, np.uint8))
        assert arena.get(handle, lambda block: None).all()
