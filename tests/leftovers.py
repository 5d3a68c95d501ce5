"""Finding what a test may have left: processes, files, open descriptors, memory."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Waits for a condition, looking at it often; fails with ``what`` after the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.01)


def processes_of(folder: Path) -> dict[int, str]:
    """Processes that were told of a folder, in their environment: id -> command line. Zombies have none."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.name != str(os.getpid()) and os.fsencode(folder) in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue
    return found


def files_in(folder: Path) -> list[str]:
    """Everything below a folder but folders; others may be removing some (rglob would mind, walk doesn't)."""
    return sorted(
        os.path.relpath(os.path.join(above, name), folder)
        for above, _, names in os.walk(folder)
        for name in names
    )


def children() -> set[int]:
    """Child processes of this one, also dead ones that nobody has waited for."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
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
