"""Chunks on disk of runs that are over, on hosts that were not their brokers'.

On its own host a broker knows from its journal what is needed. On any other a run has a folder `chunks-RUN`
(:func:`broker.serving.store_here`), which stays when all that worked for it there was killed. That nobody is
there does not say that the run is over: the host may just have been restarted, and the broker, elsewhere, may
still count on these files. So a folder goes when nobody here works for its run and it has lain untouched for
a week.
"""

from __future__ import annotations

import re
import shutil
import time
from contextlib import closing
from pathlib import Path

from adapters.sweep import RunLock, segments

UNTOUCHED_S = 7 * 24 * 3600.0
_FOLDER = re.compile(r"chunks-([0-9a-f]{16})")


def sweep_chunks(state: Path, shm: Path) -> list[Path]:
    """Removes them, and says which.

    Args:
        state: The state folder; it need not be there.
        shm: The folder of shared memory, which tells who is alive.
    """
    found = [(path, match[1]) for path in state.glob("chunks-*") if (match := _FOLDER.fullmatch(path.name))]
    old = [(path, run) for path, run in found if _touched(path) < time.time() - UNTOUCHED_S]
    alive = {item.run for item in segments(shm) if item.owner_alive} if old else set()
    return [path for path, run in old if run not in alive and _removed(path, run, shm)]


def _touched(path: Path) -> float:
    """When something was last written there, as a time since the epoch."""
    try:
        return max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
    except OSError:  # it is going just now, or is no folder
        return time.time()


def _removed(path: Path, run: str, shm: Path) -> bool:
    """Whether nobody worked for the run; whoever begins to meanwhile waits for the run's lock."""
    try:
        with closing(RunLock(run, shm, tries=1)):
            shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return False
    return not path.exists()
