"""Locks on files, which tell whether a process lives: they go with it, however it dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def try_lock(fd: int) -> bool:
    """Takes the exclusive flock of an open file, unless somebody holds it. Whether it did."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock of this file; one that can't be opened is not locked."""
    fd = _open(path)
    if fd is None:
        return False
    try:
        # Shared, so that two who look at the same time don't take each other for the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def remove_unlocked(path: Path) -> bool:
    """Removes a file whose lock nobody holds, holding the lock meanwhile. Whether it did."""
    fd = _open(path)
    if fd is None:
        return False
    try:
        if not try_lock(fd):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
