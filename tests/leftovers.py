"""Finding what a test may have left: processes, files, open descriptors, memory."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from scripts.leftovers import processes_of


def until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Waits for a condition, looking at it often; fails with ``what`` after the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.01)


def process_of(folder: Path, module: str) -> int:
    """The one process told of a folder that runs a module of ours, once there is one."""
    found: list[int] = []

    def one() -> bool:
        found[:] = [pid for pid, command in processes_of(folder).items() if module in command.split()]
        return len(found) == 1

    until(one, f"one process of {module}")
    return found[0]


def children(pid: int | str = "self") -> set[int]:
    """Child processes of a process, also dead ones that nobody has waited for."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def descriptors() -> int:
    """How many files, pipes and sockets are open."""
    return len(os.listdir("/proc/self/fd"))


def descriptors_above(number: int) -> bool:
    """Whether more are open, after all that is garbage has been closed (collecting costs, so only then)."""
    if descriptors() > number:
        gc.collect()
    return descriptors() > number


def resident_mb() -> int:
    """Memory that this process has in use, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20
