"""Removing what dead processes left in the shared-memory folder, and nothing else.

Process ids lie across containers and get reused, so a lock tells whether an owner lives: each owner holds a
flock on its segments for life, and the broker of a run one on the file ``omni-<run>-run``. While the run
lives, its broker alone removes the segments of its dead producers (:func:`unlink_owner`), because their last
chunks may still be read. Segments of dead owners in dead runs go in :func:`sweep`.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from adapters.locks import is_locked, remove_unlocked, try_lock
from adapters.segment import OWNER, RUN, SEGMENT, shm_dir

_RUN_FILE = re.compile(r"omni-[0-9a-f]{16}-run")
_TRIES = 20
_PREFIX = re.compile(rf"omni-{RUN.pattern}-{OWNER.pattern}-")


class Listed(NamedTuple):
    """One segment in the folder."""

    name: str
    bytes: int
    owner_alive: bool
    run_alive: bool


class Swept(NamedTuple):
    """A file that was removed."""

    name: str
    bytes: int


class RunLock:
    """Says, while it is held, that a run lives. One per broker, held for life."""

    def __init__(self, run: str, folder: Path | None = None) -> None:
        """Takes the lock. Raises ValueError for a bad run nonce, BlockingIOError when somebody holds it."""
        if not RUN.fullmatch(run):
            raise ValueError(f"run {run!r} is not 16 hex digits")
        self._path = _run_file(run, folder or shm_dir())
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(_TRIES):
            self._fd = os.open(self._path, flags, 0o600)
            if try_lock(self._fd) and os.fstat(self._fd).st_nlink:
                return
            # A sweeper or a listing looks at the file just now; a sweeper also removes it. Or a broker lives.
            os.close(self._fd)
            time.sleep(0.01)
        raise BlockingIOError(f"another broker of run {run} is alive")

    def close(self) -> None:
        """Ends the run: removes the file, gives the lock up. Idempotent."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def segments(folder: Path | None = None) -> list[Listed]:
    """All our segments in the folder."""
    folder = folder or shm_dir()
    return [
        Listed(path.name, size, is_locked(path), is_locked(_run_file(path.name[5:21], folder)))
        for path, size in _files(folder, SEGMENT)
    ]


def sweep(folder: Path | None = None) -> list[Swept]:
    """Removes the segments whose owner and whose run are gone, and the run files of dead runs.

    Files of other users, with other names, and anything that is no regular file are left alone. A file that a
    crash left at 0 bytes goes like any other: nothing needs to be mapped to be removed.
    """
    folder = folder or shm_dir()
    swept = [
        Swept(path.name, size)
        for path, size in _files(folder, SEGMENT)
        if not is_locked(_run_file(path.name[5:21], folder)) and remove_unlocked(path)
    ]
    swept += [Swept(path.name, size) for path, size in _files(folder, _RUN_FILE) if remove_unlocked(path)]
    return swept


def unlink_owner(prefix: str, folder: Path | None = None) -> list[Swept]:
    """Removes all segments of one dead producer; ``prefix`` is its :attr:`SharedMemory.prefix`.

    The caller knows that nobody needs them any more. Raises ValueError for anything but such a prefix.
    """
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(f"{prefix[:80]!r} is no prefix of an arena")
    swept = []
    for path, size in _files(folder or shm_dir(), SEGMENT):
        if path.name.startswith(prefix):
            path.unlink(missing_ok=True)
            swept.append(Swept(path.name, size))
    return swept


def _run_file(run: str, folder: Path) -> Path:
    return folder / f"omni-{run}-run"


def _files(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, int]]:
    """Regular files of ours whose name fits, with their sizes."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if not pattern.fullmatch(entry.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
                    yield Path(entry.path), info.st_size
