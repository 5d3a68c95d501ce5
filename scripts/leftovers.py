"""What the tests and the benches look at in others' folders and processes, which may be going just then."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.01


def files_in(folder: Path) -> list[str]:
    """Paths from the folder of everything below it but folders.

    Others may be removing some of it: `os.walk` passes over a folder that has gone, `Path.glob` raises.
    """
    return sorted(
        os.path.relpath(os.path.join(above, name), folder)
        for above, _, names in os.walk(folder)
        for name in names
    )


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


def kill_all(folder: Path) -> None:
    """SIGKILL to all processes told of a folder, again until none is left: one may start others meanwhile."""
    while pids := processes_of(folder):
        for pid in pids:
            with suppress(ProcessLookupError):  # many die with their parent
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)
