"""Names of hosts and stores: the same for all who share a folder, and in every handle."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from adapters.arena import SharedMemory
from adapters.disk import DiskStore
from adapters.host import DIGITS, forget_store_name, host_of, store_name, this_host
from adapters.segment import SEGMENT

RUN = "0123456789abcdef"


def test_a_folder_of_shared_memory_is_a_host(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    (tmp_path / "link").symlink_to(one)
    assert this_host(one) == this_host(tmp_path / "link") != this_host(other)
    assert this_host(tmp_path / "absent") not in (this_host(one), this_host(other))


def test_a_block_says_which_host_it_lies_on(tmp_path: Path) -> None:
    with SharedMemory(RUN, folder=tmp_path) as arena:
        place = arena.put(np.zeros(10)).block.place
        assert SEGMENT.fullmatch(place)
        assert host_of(place) == host_of(arena.prefix) == this_host(tmp_path)


def test_a_file_says_which_store_it_lies_in_also_after_a_restart(tmp_path: Path) -> None:
    place = DiskStore(tmp_path / "chunks").put("request-1", memoryview(b"x"))
    again = DiskStore(tmp_path / "chunks")
    assert host_of(place) == again.name()
    assert again.has(place)
    assert not again.has(place[:-1] + ("0" if place[-1] != "0" else "1"))
    again.discard("request-1")
    again.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "place",
    [
        "",
        "x",
        f"omni-{RUN}-0123456789abcdef-0",
        f"omni-{RUN}-{'0' * 24}-0x",
        "a/b",
        "landed",
        "request-1/mc12",
    ],
)
def test_what_names_no_host_is_local(place: str) -> None:
    assert host_of(place) == ""


def test_all_who_open_a_store_at_once_agree_on_its_name(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        names = set(threads.map(lambda _: store_name(tmp_path), range(64)))
    assert len(names) == 1
    assert os.listdir(tmp_path) == ["name"]


def test_a_power_cut_leaves_a_store_with_its_whole_name_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link may reach the disk before the bytes of its file, and a store of an empty name is of no use."""
    flushed = set()
    fsync, link = os.fsync, os.link

    def flush(fd: int) -> None:
        fsync(fd)
        flushed.add((os.fstat(fd).st_ino, os.fstat(fd).st_size))

    def linked(source: Path, target: Path) -> None:
        assert (source.stat().st_ino, DIGITS) in flushed
        link(source, target)

    monkeypatch.setattr("os.fsync", flush)
    monkeypatch.setattr("os.link", linked)
    assert len(store_name(tmp_path)) == DIGITS


def test_who_is_killed_while_drawing_a_name_leaves_no_folder_for_ever(
    tmp_path: Path, fork: Callable[[Callable[[], None]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path / "chunks")
    monkeypatch.setattr("os.link", lambda source, target: os.kill(os.getpid(), signal.SIGKILL))

    def put() -> None:
        store.put("request-1", memoryview(b"x"))

    os.waitpid(fork(put), 0)
    monkeypatch.undo()
    assert len(os.listdir(store.folder)) == 1
    put()
    store.discard("request-1")
    store.close()
    assert not store.folder.exists()


def test_a_store_that_holds_something_keeps_its_name(tmp_path: Path) -> None:
    name = store_name(tmp_path)
    (tmp_path / "request-1").mkdir()
    forget_store_name(tmp_path)
    assert store_name(tmp_path) == name
    (tmp_path / "name").write_text("nonsense")
    with pytest.raises(ValueError, match="no store's name"):
        store_name(tmp_path)
