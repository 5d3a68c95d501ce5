"""Locks on files, which tell whether a process lives: they go with it, however it dies."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def try_lock(fd: int) -> bool:
    """Takes the exclusive flock of an open file, unless somebody holds it. Whether it did."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock of this file; one that can't be opened is not locked.

    Who has no descriptor left can't look, and takes it for locked: its owner may live.
    """
    try:
        fd = os.open(path, _FLAGS)
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
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
    try:
        fd = os.open(path, _FLAGS)
    except OSError:
        return False
    try:
        if not try_lock(fd):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)
