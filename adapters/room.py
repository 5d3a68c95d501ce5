"""How much shared memory one process may take, and whether the folder for it can hold that."""

from __future__ import annotations

import os
from pathlib import Path

from adapters.handle import AdapterError
from adapters.segment import shm_dir

MIB = 1 << 20
CEILING = 1024 * MIB  #: unless the file system is smaller than twice that


class NoRoom(AdapterError):
    """The shared-memory folder can't be used as it is configured. The message names the cure."""


def ceiling(folder: Path | None = None) -> int:
    """Bytes that one process may hold in segments: ``OMNI_SHM_MB``, else half the folder's file system.

    At most 1 GiB where nothing is set. Half, so that one process leaves others something: a container has
    64 MiB by default. Raises :class:`NoRoom` for a setting that is no number.
    """
    if (chosen := _chosen()) is not None:
        return chosen
    try:
        size = _size(folder or shm_dir())
    except OSError:  # the first put names the folder that is missing
        return CEILING
    return min(CEILING, size // 2) if size else CEILING


def check_room(folder: Path | None = None) -> None:
    """Raises :class:`NoRoom` when the folder is absent, not writable, or smaller than ``OMNI_SHM_MB``."""
    folder = folder or shm_dir()
    chosen = _chosen()
    try:
        size = _size(folder)
    except OSError as error:
        raise NoRoom(f"no shared-memory folder {folder} ({error.strerror}); see OMNI_SHM_DIR") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise NoRoom(f"the shared-memory folder {folder} can't be written; choose another with OMNI_SHM_DIR")
    if chosen is not None and size and chosen > size:
        raise NoRoom(
            f"OMNI_SHM_MB is {chosen // MIB}, but the file system of {folder} has {size // MIB} MiB; set "
            "OMNI_SHM_MB lower, choose another folder with OMNI_SHM_DIR, or give a container more with "
            f"`docker run --shm-size={-(-chosen // MIB)}m`"
        )


def _chosen() -> int | None:
    text = os.environ.get("OMNI_SHM_MB")
    if not text:
        return None
    try:
        chosen = int(text)
    except ValueError:
        chosen = 0
    if chosen < 1:
        raise NoRoom(f"OMNI_SHM_MB is {text[:40]!r}, but has to be a whole number of MiB from 1 up")
    return chosen * MIB


def _size(folder: Path) -> int:
    """Bytes of the folder's file system; 0: as many as there are (a tmpfs without a limit)."""
    info = os.statvfs(folder)
    return info.f_blocks * info.f_frsize
