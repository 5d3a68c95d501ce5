"""Removing what dead processes left in the shared-memory folder, and nothing else.

Process ids lie across containers and get reused, so a lock tells whether an owner lives: each owner holds a
flock on its segments for life, and the broker of a run one on the file ``omni-<run>-run``. A run lives as
long as any of them does, since a broker that died may come back to its workers. A run without a living
process is *kept* while the journal exists that its broker left (:class:`Keep`).

The broker of a living or kept run alone removes the segments of its dead producers (:func:`unlink_owner`,
:func:`sweep_run`), because their last chunks may still be read. All others go in :func:`sweep`.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from adapters.locks import is_locked, remove_unlocked, try_lock
from adapters.segment import OWNER, RUN, SEGMENT, shm_dir

_RUN_FILE = re.compile(r"omni-[0-9a-f]{16}-run")
_KEPT_LINK = re.compile(r"omni-[0-9a-f]{16}-kept")
_TRIES = 20
_PREFIX = re.compile(rf"omni-{RUN.pattern}-{OWNER.pattern}-")


RunState = Literal["alive", "kept", "dead"]


class Listed(NamedTuple):
    """One segment in the folder."""

    name: str
    bytes: int
    run: str
    owner_alive: bool
    run_state: RunState


class Swept(NamedTuple):
    """A file that was removed."""

    name: str
    bytes: int


class RunLock:
    """Says, while it is held, that a run lives. One per host, held by the broker, elsewhere by a guardian."""

    def __init__(self, run: str, folder: Path | None = None, *, tries: int = _TRIES) -> None:
        """Takes the lock. Raises ValueError for a bad run nonce, BlockingIOError when somebody holds it.

        ``tries``: somebody may just be looking at it, so it is tried so often, for 10 ms each.
        """
        if not RUN.fullmatch(run):
            raise ValueError(f"run {run!r} is not 16 hex digits")
        self._path = _run_file(run, folder or shm_dir())
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(tries):
            self._fd = os.open(self._path, flags, 0o600)
            if try_lock(self._fd) and os.fstat(self._fd).st_nlink:
                return
            # A sweeper or a listing looks at the file just now; a sweeper also removes it. Or a broker lives.
            os.close(self._fd)
            time.sleep(0.01)
        raise BlockingIOError(f"another process says already that run {run} is alive")

    def close(self) -> None:
        """Ends the run: removes the file, gives the lock up. Idempotent."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


class Keep:
    """Says that a run may go on although none of its processes lives: its journal is there.

    A symbolic link ``omni-<run>-kept`` to the journal, since a link is made at once or not at all. It counts
    as long as the journal exists, so that whoever removes a state folder gives up its runs with it.
    """

    def __init__(self, run: str, journal: Path, folder: Path | None = None) -> None:
        """Makes the link; one of an earlier life is fine. Other runs of that journal are kept no longer.

        Raises ValueError for a bad run nonce.
        """
        if not RUN.fullmatch(run):
            raise ValueError(f"run {run!r} is not 16 hex digits")
        folder = folder or shm_dir()
        target = str(journal.absolute())
        self._path = _kept_link(run, folder)
        links = _links(folder)
        for link, other in links.items():
            if (link == self._path) != (other == target):
                link.unlink(missing_ok=True)
        if links.get(self._path) != target:
            self._path.symlink_to(target)

    def close(self) -> None:
        """The run is over: removes the link. Idempotent."""
        self._path.unlink(missing_ok=True)


def segments(folder: Path | None = None) -> list[Listed]:
    """All our segments in the folder."""
    folder = folder or shm_dir()
    found = [(path, size, is_locked(path)) for path, size in _files(folder, SEGMENT)]
    state = _states(folder, {_run(path) for path, _, _ in found}, {_run(path) for path, _, on in found if on})
    return [Listed(path.name, size, _run(path), on, state[_run(path)]) for path, size, on in found]


def sweep(folder: Path | None = None, *, kept: bool = False) -> list[Swept]:
    """Removes the segments of dead runs, their run files, and the links of journals that are gone.

    Files of other users, with other names, and anything that is no regular file are left alone. A file that a
    crash left at 0 bytes goes like any other: nothing needs to be mapped to be removed.

    Args:
        folder: By default the shared-memory folder.
        kept: Kept runs go too; their brokers will miss what was there.
    """
    folder = folder or shm_dir()
    found = segments(folder)
    gone = {"dead", "kept"} if kept else {"dead"}
    swept = [
        Swept(item.name, item.bytes)
        for item in found
        if item.run_state in gone and remove_unlocked(folder / item.name)
    ]
    links = {_run(link): link for link in _links(folder)}
    living = {item.run for item in found if item.owner_alive}
    for run, state in _states(folder, set(links), living).items():
        if state in gone:
            links[run].unlink(missing_ok=True)
    swept += [Swept(path.name, size) for path, size in _files(folder, _RUN_FILE) if remove_unlocked(path)]
    return swept


def sweep_run(run: str, keep: set[str], folder: Path | None = None) -> list[Swept]:
    """Removes the segments of a run whose owners are dead, but those with a prefix in ``keep``.

    For a restarted broker: it knows which arenas of dead producers still hold chunks that somebody needs.
    """
    return [
        Swept(path.name, size)
        for path, size in _files(folder or shm_dir(), SEGMENT)
        if _run(path) == run and _prefix(path) not in keep and remove_unlocked(path)
    ]


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


def _run(path: Path) -> str:
    return path.name[5:21]


def _prefix(path: Path) -> str:
    """The arena's prefix in a segment's name, see :attr:`SharedMemory.prefix`."""
    return path.name.rpartition("-")[0] + "-"


def _states(folder: Path, runs: set[str], living: set[str]) -> dict[str, RunState]:
    """How each of these runs is; ``living`` are those of which a producer lives."""
    kept = {_run(link) for link in _links(folder) if os.path.exists(link)}
    return {
        run: "alive"
        if run in living or is_locked(_run_file(run, folder))
        else "kept"
        if run in kept
        else "dead"
        for run in runs
    }


def _kept_link(run: str, folder: Path) -> Path:
    return folder / f"omni-{run}-kept"


def _links(folder: Path) -> dict[Path, str]:
    """Our links to journals, and what they point to, be it there or not."""
    found = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if _KEPT_LINK.fullmatch(entry.name) and entry.is_symlink():
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        found[Path(entry.path)] = os.readlink(entry.path)
    return found


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
