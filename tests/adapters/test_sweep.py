"""Leftovers of dead processes go, and nothing else (C43, C44)."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from adapters.arena import SharedMemory
from adapters.handle import AdapterError, Handle
from adapters.locks import is_locked
from adapters.sweep import RunLock, segments, sweep, unlink_owner
from tests.adapters.conftest import RUN

Fork = Callable[[Callable[[], None]], int]


def dead_producer(fork: Fork) -> Handle:
    """A tensor whose producer was killed after it had sent the handle."""
    read, write = os.pipe()

    def produce() -> None:
        arena = SharedMemory(RUN)
        os.write(write, msgspec.msgpack.encode(arena.put(np.arange(1000))))
        signal.pause()

    pid = fork(produce)
    handle = msgspec.msgpack.decode(os.read(read, 4096), type=Handle)
    kill(pid)
    os.close(read)
    os.close(write)
    return handle


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_living_owners_keep_their_segments(arena: SharedMemory) -> None:
    arena.put(np.zeros(10))
    (listed,) = segments()
    assert (listed.owner_alive, listed.run, listed.run_state, listed.bytes) == (True, RUN, "alive", 8 << 20)
    assert sweep() == []
    assert segments() == [listed]


def test_what_others_may_need_stays_when_its_owner_leaves(folder: Path) -> None:
    with SharedMemory(RUN) as reader, closing(RunLock(RUN)):
        owner = SharedMemory(RUN, first_segment=4096)
        needed, done = owner.put(np.arange(100)), owner.put(np.arange(600))
        assert needed.block.place != done.block.place
        owner.free(done.block)
        assert owner.leave()
        assert not owner.leave()
        assert [segment.name for segment in segments()] == [needed.block.place]
        assert not segments()[0].owner_alive
        assert sweep() == []
        assert reader.get(needed, lambda block: None).tolist() == list(range(100))
        with pytest.raises(AdapterError, match="closed"):
            owner.put(np.zeros(10))
    assert [swept.name for swept in sweep()] == [needed.block.place]


def test_dead_owners_segments_go(fork: Fork, folder: Path) -> None:
    handle = dead_producer(fork)
    (listed,) = segments()
    assert not listed.owner_alive
    assert [swept.name for swept in sweep()] == [handle.block.place]
    assert os.listdir(folder) == []


def test_a_dead_producers_tensor_is_readable_while_the_run_lives(fork: Fork, arena: SharedMemory) -> None:
    run = RunLock(RUN)
    handle = dead_producer(fork)
    assert sweep() == []
    view = arena.get(handle, lambda block: None)
    assert view.sum() == 499500
    prefix = handle.block.place.rpartition("-")[0] + "-"
    assert [swept.name for swept in unlink_owner(prefix)] == [handle.block.place]
    assert view.sum() == 499500
    run.close()
    run.close()


def test_a_killed_broker_ends_its_run(fork: Fork, folder: Path) -> None:
    read, write = os.pipe()

    def broker() -> None:
        RunLock(RUN)
        os.write(write, b"!")
        signal.pause()

    pid = fork(broker)
    os.read(read, 1)
    handle = dead_producer(fork)
    with pytest.raises(BlockingIOError, match="alive"):
        RunLock(RUN)
    assert sweep() == []
    kill(pid)
    assert {swept.name for swept in sweep()} == {handle.block.place, f"omni-{RUN}-run"}
    os.close(read)
    os.close(write)


def test_a_grandchild_does_not_keep_a_dead_owner_alive(fork: Fork, folder: Path) -> None:
    read, write = os.pipe()

    def produce() -> None:
        arena = SharedMemory(RUN)
        arena.put(np.zeros(10))
        child = os.fork()
        if child == 0:
            signal.pause()
        os.write(write, str(child).encode())
        signal.pause()

    pid = fork(produce)
    grandchild = int(os.read(read, 20))
    kill(pid)
    try:
        assert len(sweep()) == 1
    finally:
        os.kill(grandchild, signal.SIGKILL)
    os.close(read)
    os.close(write)


def test_sweeping_goes_by_name_type_and_owner_only(folder: Path, tmp_path: Path) -> None:
    place = f"omni-{RUN}-0123456789abcdef-"
    secret = tmp_path / "secret"
    secret.touch()
    (folder / f"{place}0").touch()  # a crash before the space was reserved
    (folder / f"{place}1").write_bytes(bytes(100))
    others = ["omni-x", "omni-", f"{place}", f"{place}0.bak", f"x{place}0", f"{place}0x", "psm_1234", "sem.x"]
    for name in others:
        (folder / name).touch()
    (folder / f"{place}7").symlink_to(secret)
    (folder / f"{place}8").mkdir()
    os.mkfifo(folder / f"{place}9")
    kept = {*others, f"{place}7", f"{place}8", f"{place}9"}
    if os.geteuid() == 0:
        (folder / f"{place}5").touch()
        os.chown(folder / f"{place}5", 12345, 12345)
        kept.add(f"{place}5")
    assert {swept.name for swept in sweep()} == {f"{place}0", f"{place}1"}
    assert set(os.listdir(folder)) == kept
    assert secret.exists()
    (folder / f"{place}8").rmdir()
    for file in folder.iterdir():
        file.unlink()


def test_an_absent_folder_is_empty(tmp_path: Path) -> None:
    assert sweep(tmp_path / "absent") == []
    assert segments(tmp_path / "absent") == []


@pytest.mark.parametrize("prefix", ["", "omni-", f"omni-{RUN}-", "../", f"omni-{RUN}-0123456789abcdef", "*"])
def test_only_a_whole_owners_prefix_unlinks(prefix: str, arena: SharedMemory) -> None:
    arena.put(np.zeros(10))
    with pytest.raises(ValueError, match="prefix"):
        unlink_owner(prefix)
    assert len(segments()) == 1


def test_a_segment_is_never_swept_between_creation_and_lock(fork: Fork, folder: Path) -> None:
    def sweep_for_ever() -> None:
        while True:
            sweep()

    pid = fork(sweep_for_ever)
    for number in range(300):
        with SharedMemory(RUN, first_segment=4096) as arena:
            handle = arena.put(np.full(10, number))
            assert (arena.get(handle, lambda block: None) == number).all()
    kill(pid)


def test_killed_producers_leave_nothing_after_a_sweep(fork: Fork, folder: Path) -> None:
    """A kill at any moment: before a segment is made, while it is made, in mid copy, while one is freed."""
    dice = random.Random(43)
    tensor = np.zeros(300_000)
    read, write = os.pipe()

    def produce() -> None:
        os.write(write, b"!")
        while True:
            with SharedMemory(RUN, first_segment=4096) as arena:
                for _ in range(3):
                    arena.free(arena.put(tensor[: dice.randrange(300_000)]).block)

    leftovers = 0
    for number in range(100):
        pid = fork(produce)
        if number % 2:  # else the beginning may be what is hit
            os.read(read, 100)
        time.sleep(dice.uniform(0, 0.01))  # not to wait for something: the moment is the test
        kill(pid)
        leftovers += len(sweep())
        assert os.listdir(folder) == []
    assert leftovers > 10  # the kills did hit
    os.close(read)
    os.close(write)


def test_killed_consumers_cost_the_producer_nothing(fork: Fork, arena: SharedMemory) -> None:
    dice = random.Random(44)
    handle = arena.put(np.arange(100_000))

    def consume() -> None:
        while True:
            with SharedMemory(RUN) as reader:
                reader.get(handle, lambda block: None).sum()

    for _ in range(100):
        pid = fork(consume)
        time.sleep(dice.uniform(0, 0.005))
        kill(pid)
    assert sweep() == []
    assert arena.get(handle, lambda block: None).sum() == 99_999 * 50_000


def test_who_has_no_descriptor_left_takes_nobody_for_dead(fork: Fork, folder: Path) -> None:
    path = folder / "lock"
    path.touch()
    assert not is_locked(path)

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
        assert is_locked(path)

    assert os.waitstatus_to_exitcode(os.waitpid(fork(child), 0)[1]) == 0
    path.unlink()
