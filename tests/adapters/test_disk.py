"""Files of the disk store are whole or not there (C41), and checked before they are believed (C72)."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.disk import DiskStore
from adapters.handle import AdapterError, ArenaFull, BadHandle

Fork = Callable[[Callable[[], None]], int]
NAME = "request-0"
HEADER = 36  # what comes before a tensor's bytes
DATA = bytes(range(256)) * 40


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path / "chunks")
    yield store
    for name in store.names():
        store.discard(name)
    store.close()
    assert not store.folder.exists()


def put(store: DiskStore, data: bytes, name: str = NAME) -> str:
    return store.put(name, memoryview(data))


def files(store: DiskStore) -> list[str]:
    return sorted(str(path.relative_to(store.folder)) for path in store.folder.glob("*/*"))


# --- crashes


def test_a_kill_at_any_moment_of_a_write_leaves_whole_files_and_what_was_announced(
    store: DiskStore, fork: Fork
) -> None:
    dice = random.Random(41)
    half_written = 0
    for number in range(200):
        read, write = os.pipe()

        def produce(write: int = write, seed: int = dice.randrange(1 << 30)) -> None:
            sizes = random.Random(seed)
            while True:
                data = sizes.randbytes(sizes.randrange(400_000))
                os.write(write, msgspec.json.encode([put(store, data), len(data), data[:8].hex()]) + b"\n")

        pid = fork(produce)
        os.close(write)
        with open(read, "rb") as pipe:
            announced = [pipe.readline()] if number % 2 else []  # else the first file is what is hit
            time.sleep(dice.uniform(0, 0.01))  # not to wait for something: the moment is the test
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            announced += pipe
        for line in announced:
            place, size, start = msgspec.json.decode(line)
            assert store.read(place, size)[:8].hex() == start
        for path in store.folder.glob("*/*"):
            if path.suffix:
                half_written += 1
            else:
                store.read(f"{NAME}/{path.name}", path.stat().st_size - HEADER)
        assert store.sweep({NAME}) == []
        assert not any(path.suffix for path in store.folder.glob("*/*"))  # a dead writer's files are swept
        store.discard(NAME)
    assert half_written > 10  # the kills did hit


def test_writers_at_the_same_time_have_files_of_their_own(store: DiskStore) -> None:
    written: dict[str, bytes] = {}

    def work(number: int) -> None:
        for step in range(20):
            data = bytes([number, step]) * (1 + 5000 * number)
            written[put(store, data)] = data

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 80
    assert files(store) == sorted(written)
    for place, data in written.items():
        assert store.read(place, len(data)) == data


def test_a_sweep_leaves_alone_what_a_living_writer_has_half_written(store: DiskStore, fork: Fork) -> None:
    put(store, DATA)

    def sweep_for_ever() -> None:
        while True:
            store.sweep({NAME})

    pid = fork(sweep_for_ever)
    for number in range(200):
        data = bytes([number]) * 10_000
        assert store.read(put(store, data), len(data)) == data
    os.kill(pid, signal.SIGKILL)


def test_a_folder_that_goes_with_its_last_file_may_come_back_at_once(store: DiskStore) -> None:
    """One thread removes a request's only file, and so its folder, while another writes into that."""

    def come_and_go() -> None:
        for _ in range(200):
            assert store.unlink(put(store, b"x"))

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.names() == []


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut to half": lambda file: file[: len(file) // 2],
    "cut in the header": lambda file: file[:20],
    "empty": lambda file: b"",
    "zero-filled": lambda file: bytes(len(file)),
    "data zero-filled": lambda file: file[:HEADER] + bytes(len(file) - HEADER),
    "wrong version": lambda file: file[:8] + b"\2" + file[9:],
    "wrong magic": lambda file: b"omnifilm" + file[8:],
    "wrong length": lambda file: file[:12] + bytes([file[12] ^ 1]) + file[13:],
    "wrong checksum": lambda file: file[:20] + bytes([file[20] ^ 1]) + file[21:],
    "one bit": lambda file: file[:5000] + bytes([file[5000] ^ 4]) + file[5001:],
    "a tail of an earlier file": lambda file: file + b"tail",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_an_error_and_no_crash(damage: str, store: DiskStore) -> None:
    good, bad = put(store, DATA), put(store, DATA)
    path = store.folder / bad
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(BadHandle, match=bad):
        store.read(bad, len(DATA))
    assert store.read(good, len(DATA)) == DATA
    assert store.unlink(bad)


def test_a_file_that_is_gone_or_of_another_size_is_an_error(store: DiskStore) -> None:
    place = put(store, DATA)
    for size in (len(DATA) + 1, len(DATA) - 1, 0, 1 << 60):
        with pytest.raises(BadHandle, match="bytes"):
            store.read(place, size)
    assert store.unlink(place)
    assert not store.unlink(place)
    with pytest.raises(BadHandle, match="No such file"):
        store.read(place, len(DATA))


def test_nothing_at_all_can_be_stored(store: DiskStore) -> None:
    assert store.read(put(store, b""), 0) == b""


# --- no room


def test_a_full_disk_fails_the_put_and_names_the_cure(tiny_tmpfs: Path) -> None:
    store = DiskStore(tiny_tmpfs / "chunks")
    held = put(store, DATA)
    for _ in range(20):
        with pytest.raises(ArenaFull, match=r"chunks .*OMNI_STATE_DIR") as caught:
            put(store, bytes(2 << 20))
        assert not caught.value.retryable
    assert files(store) == [held]
    assert store.read(held, len(DATA)) == DATA
    data = bytes(500_000)
    assert store.read(put(store, data), len(data)) == data  # what fits still goes


@pytest.mark.parametrize("call", ["os.open", "os.fsync"])
def test_a_put_that_fails_leaves_no_folder(
    call: str, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker discards what chunks have told it of, and of this request none does."""
    original, name = getattr(os, call.partition(".")[2]), store.name()

    def full(what: Any, *arguments: Any, **options: Any) -> Any:
        path = str(what) if call == "os.open" else os.readlink(f"/proc/self/fd/{what}")
        if path.endswith(".tmp"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(what, *arguments, **options)

    monkeypatch.setattr(call, full)
    with pytest.raises(ArenaFull):
        put(store, DATA)
    assert os.listdir(store.folder) == ["name"]
    assert store.name() == name


def test_a_limit_on_file_sizes_is_an_error_not_a_signal(store: DiskStore, fork: Fork) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        with pytest.raises(ArenaFull, match="File too large"):
            put(store, bytes(200_000))
        assert files(store) == []
        put(store, bytes(50_000))

    assert os.waitstatus_to_exitcode(os.waitpid(fork(limited), 0)[1]) == 0


def test_a_state_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"absent/chunks.*OMNI_STATE_DIR"):
        put(DiskStore(tmp_path / "absent" / "chunks"), DATA)


# --- whose files, and which


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_files_and_folders_are_private_whatever_the_umask(umask: int, store: DiskStore) -> None:
    before = os.umask(umask)
    try:
        place = put(store, DATA)
    finally:
        os.umask(before)
    modes = [
        path.stat().st_mode & 0o777 for path in (store.folder, store.folder / NAME, store.folder / place)
    ]
    assert modes == [0o700, 0o700, 0o600]


PLACE = f"{NAME}/{'0' * 32}"


@pytest.mark.parametrize(
    "place",
    [
        *(
            "",
            ".",
            "..",
            "../x",
            "/etc/passwd",
            "a/b",
            "x" * 300,
            "\0",
            "\ud800",
            NAME,
            f"{NAME}/",
            "/" + "0" * 32,
        ),
        *(PLACE + "\n", PLACE + "/", PLACE + "\0", f"../chunks/{PLACE}", f"{NAME}/../{PLACE}", f"/{PLACE}"),
        *(
            f"{NAME}/{'0' * 31}",
            f"{NAME}/{'0' * 33}",
            f"{NAME}/{'A' * 32}",
            f"{NAME}\n/{'0' * 32}",
            f"a/{'0' * 32}",
        ),
        f"{NAME}/.{'0' * 31}",
    ],
)
def test_places_from_messages_lead_nowhere_else(place: str, store: DiskStore) -> None:
    good = put(store, DATA)
    with pytest.raises(BadHandle, match="no place"):
        store.read(place, len(DATA))
    assert not store.unlink(place)
    assert files(store) == [good]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../../etc", "a/b12345", "short", "x" * 65, "name\0name", "name-123\n"]
)
def test_a_name_that_is_none_neither_writes_nor_removes(name: str, store: DiskStore) -> None:
    good = put(store, DATA)
    with pytest.raises(ValueError, match="no request's name"):
        put(store, DATA, name)
    with pytest.raises(ValueError, match="no request's name"):
        store.discard(name)
    assert files(store) == [good]


def test_links_devices_and_other_peoples_files_are_not_read(store: DiskStore, tmp_path: Path) -> None:
    good = put(store, DATA)
    path = store.folder / good
    secret = tmp_path / "secret"
    secret.write_bytes(path.read_bytes())
    secret.chmod(0o600)

    def refuse() -> None:
        with pytest.raises(BadHandle):
            store.read(good, len(DATA))

    for mode in (0o666, 0o644, 0o620):
        path.chmod(mode)
        refuse()
    path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        refuse()
    path.unlink()
    path.symlink_to(secret)
    refuse()
    path.unlink()
    os.mkfifo(path, 0o600)
    refuse()
    path.unlink()
    path.mkdir(0o700)
    refuse()
    path.rmdir()
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    path.parent.rmdir()
    path.parent.symlink_to(folder)
    (folder / path.name).write_bytes(secret.read_bytes())
    (folder / path.name).chmod(0o600)
    refuse()
    store.discard(NAME)
    assert (folder / path.name).exists()  # a discard follows no link either
    path.parent.unlink()


def test_a_sweep_takes_the_folders_of_other_requests_and_nothing_else(store: DiskStore) -> None:
    kept = put(store, DATA, "request-1")
    put(store, DATA, "request-2")
    put(store, DATA, "request-2")
    (store.folder / "no name").mkdir()
    (store.folder / "somefile").touch()
    assert store.sweep({"request-1", "request-3"}) == ["request-2"]
    assert store.names() == ["request-1"]
    assert store.read(kept, len(DATA)) == DATA
    (store.folder / "no name").rmdir()
    (store.folder / "somefile").unlink()


def test_a_store_that_was_never_written_is_empty(store: DiskStore) -> None:
    assert store.names() == []
    assert store.sweep(set()) == []
    store.discard(NAME)
    store.close()
