"""A shared-memory folder of its own for each test, checked for leftovers, and child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adapters.arena import SharedMemory
from adapters.handle import BlockId

RUN = "5eed" * 4


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The shared-memory folder; at the end it is empty again, and no file descriptor has leaked."""
    with tempfile.TemporaryDirectory(prefix="omni-test-", dir="/dev/shm") as name:
        monkeypatch.setenv("OMNI_SHM_DIR", name)
        before = open_fds()
        yield Path(name)
        assert os.listdir(name) == []
        assert open_fds() <= before


@pytest.fixture
def arena(folder: Path) -> Iterator[SharedMemory]:
    with SharedMemory(RUN) as arena:
        yield arena


@pytest.fixture
def released() -> list[BlockId]:
    """A list whose ``append`` is the callback of ``get``."""
    return []


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[], None]], int]]:
    """Runs a function in a forked process and gives its id; what still runs at the end is killed."""
    children: list[int] = []

    def start(function: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                function()
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
        return pid

    yield start
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


@pytest.fixture
def tiny_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
