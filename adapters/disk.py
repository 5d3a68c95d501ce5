"""Tensors on disk: what must outlive processes or the host, and what shared memory has no room for.

    store = DiskStore(folder)
    place = store.put("speech-7f3a90c2", data)     # "speech-7f3a90c2/<32 hex digits>", there for good
    data = store.read(place, len(data))            # checked: a file that was cut or changed is an error
    store.discard("speech-7f3a90c2")               # all files of that request

A file is written under a temporary name of its own, reaches the disk, and only then gets its name, so a crash
at any moment leaves the whole file or none. Nothing is ever written twice: each put has a name of its own.

No NumPy here: the broker, which removes files, never looks at a tensor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from adapters.handle import AdapterError, ArenaFull, BadHandle
from adapters.host import DIGITS, forget_store_name, store_name
from adapters.locks import remove_unlocked
from adapters.store import NAME, Beside, check_name, checksum

PLACE = re.compile(rf"{NAME.pattern}/[0-9a-f]{{32}}")

VERSION = 1

_MAGIC = b"omnifile"
_HEADER = struct.Struct("<8sIQ16s")  #: magic, version, bytes of the tensor, their checksum
_TEMPORARY = ".tmp"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TRIES = 100


class DiskStore(Beside):
    """Files of tensors, one folder per request. Thread-safe; everything blocks, but for :meth:`on_thread`.

    Any number of processes may share the folder.
    """

    transport = "disk"

    def __init__(self, folder: Path) -> None:
        """Makes no file yet. ``folder`` is made by the first put; its parent has to be there."""
        super().__init__()
        self.folder = folder
        self.text = str(folder)

    def put(self, name: str, data: memoryview) -> str:
        """Writes a tensor's bytes for the request of this name. Returns their place, once they are on disk.

        Raises ValueError for a bad name, :class:`ArenaFull` (not retryable) when the disk is full, and
        :class:`AdapterError` when the folder can't be written, or the request was discarded meanwhile. After
        an error nothing is left.

        Args:
            name: The request's name, see :data:`NAME`.
            data: One-dimensional, of bytes.
        """
        try:
            place = f"{check_name(name)}/{self.name()}{secrets.token_hex(16 - DIGITS // 2)}"
            path = self.folder / place
            temporary = path.with_suffix(_TEMPORARY)
            fd = self._create(temporary)
            try:
                _write(fd, _HEADER.pack(_MAGIC, VERSION, len(data), checksum(data)))
                _write(fd, data)
                os.fsync(fd)
                temporary.rename(path)
                _sync(path.parent)
            except BaseException:
                temporary.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)  # gives the lock up: nobody takes the file for a dead writer's before
        except OSError as error:
            with contextlib.suppress(OSError):  # it may have others
                (self.folder / name).rmdir()  # nobody would remove it: no chunk tells of it
            raise self._unwritten(len(data), error) from error
        return place

    def read(self, place: str, nbytes: int) -> bytes:
        """The tensor's bytes that were put here. Raises :class:`BadHandle` when that is not what is here."""
        file = self._open(place)
        try:
            with file:
                size = os.fstat(file.fileno()).st_size
                if size != _HEADER.size + nbytes:
                    raise BadHandle(
                        f"{place} has {size:,} bytes where {_HEADER.size + nbytes:,} were written"
                    )
                magic, version, length, written = _HEADER.unpack(file.read(_HEADER.size))
                if (magic, length) != (_MAGIC, nbytes):
                    raise BadHandle(f"{place} is no file of the disk store, or was overwritten")
                if version != VERSION:
                    raise BadHandle(f"{place} was written by another version of omni-broker")
                data = file.read(nbytes)
        except (OSError, struct.error) as error:
            raise BadHandle(f"can't read {place}: {error}") from None
        if len(data) != nbytes or checksum(data) != written:
            raise BadHandle(f"{place} is damaged: its checksum differs")
        return data

    def name(self) -> str:
        """What the store is called, also by other hosts; see :func:`adapters.host.store_name`.

        Makes the folder. Raises OSError when it can't be written.
        """
        for _ in range(_TRIES):
            self._make(self.folder)
            with contextlib.suppress(FileNotFoundError):  # somebody has just closed the empty store
                return store_name(self.folder)
        raise FileNotFoundError(errno.ENOENT, "it is removed again and again", str(self.folder))

    def has(self, place: str) -> bool:
        """Whether this file is here; it may be a bad one."""
        return PLACE.fullmatch(place) is not None and (self.folder / place).exists()

    def unlink(self, place: str) -> bool:
        """Removes one file, and its request's folder with the last one. Whether it was there."""
        if not PLACE.fullmatch(place):
            return False
        path = self.folder / place
        try:
            path.unlink()
        except OSError:
            return False
        with contextlib.suppress(OSError):  # most often: there are more
            path.parent.rmdir()
        return True

    def discard(self, name: str) -> None:
        """Removes all files of a request; none is fine. Raises ValueError for a bad name."""
        shutil.rmtree(self.folder / check_name(name), ignore_errors=True)

    def names(self) -> list[str]:
        """The requests that have a folder."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.folder) as entries:
            return sorted(
                entry.name
                for entry in entries
                if NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )
        return []

    def sweep(self, keep: set[str]) -> list[str]:
        """Removes the folders of all requests but these, and what dead writers left in theirs.

        Returns the names of the requests whose folders went.
        """
        gone = []
        for name in self.names():
            if name in keep:
                for path in (self.folder / name).glob(f"*{_TEMPORARY}"):
                    remove_unlocked(path)
            else:
                self.discard(name)
                gone.append(name)
        return gone

    def leave(self) -> None:
        """Nothing is open between calls."""

    def close(self) -> None:
        """Removes the folder, if nothing but its name is in it."""
        forget_store_name(self.folder)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    # --- files

    def _create(self, path: Path) -> int:
        """A new file, locked for as long as it is open: so a sweep can tell it from a dead writer's."""
        for _ in range(_TRIES):
            self._make(self.folder)
            self._make(path.parent)
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # somebody removed the request's last file, and with it the folder
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    os.fchmod(fd, 0o600)  # whatever the umask
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # swept between creation and lock
        raise FileNotFoundError(errno.ENOENT, "it is removed again and again", str(path.parent))

    @staticmethod
    def _make(folder: Path) -> None:
        try:
            folder.mkdir(0o700)
        except FileExistsError:
            return
        with contextlib.suppress(FileNotFoundError):
            folder.chmod(0o700)  # whatever the umask
        _sync(folder.parent)

    def _open(self, place: str) -> BinaryIO:
        if not PLACE.fullmatch(place):
            raise BadHandle(f"{place[:80]!r} is no place in a disk store")
        name, _, number = place.partition("/")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with _opened(self.folder / name, flags | os.O_DIRECTORY) as folder:
                fd = os.open(number, flags | os.O_NONBLOCK, dir_fd=folder)
        except OSError as error:
            raise BadHandle(f"can't open {place} in {self.folder}: {error.strerror}") from None
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            os.close(fd)
            raise BadHandle(f"{place} is no private file of ours")
        return open(fd, "rb")

    def _unwritten(self, nbytes: int, error: OSError) -> AdapterError:
        if error.errno in _FULL:
            full = ArenaFull(
                f"no space for {nbytes:,} bytes in the disk store {self.folder} ({error.strerror}); make "
                "room there, or start with OMNI_STATE_DIR on a larger disk"
            )
            full.retryable = False
            return full
        if isinstance(error, FileNotFoundError) and self.folder.is_dir():
            return AdapterError(f"the request's folder in the disk store was removed: {error}")
        return AdapterError(f"can't write to the disk store {self.folder}: {error}; see OMNI_STATE_DIR")


def _write(fd: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:  # one call writes at most 2 GiB
        rest = rest[os.write(fd, rest) :]


def _sync(folder: Path) -> None:
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
        os.fsync(fd)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)
