"""Names of hosts: who can map or open what, wherever the processes are.

A *host* is a domain of shared memory: the processes that see one shared-memory folder. Two containers with a
/dev/shm each are two hosts, on one machine too. The names of a host's arenas begin with its own, and the
files of a disk store with the store's, so a handle says by itself where its bytes can be read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
from hashlib import blake2b
from pathlib import Path

DIGITS = 12  #: hexadecimal, of a host's or a store's name

_ARENA = re.compile(rf"omni-[0-9a-f]{{16}}-([0-9a-f]{{{DIGITS}}})[0-9a-f]{{{DIGITS}}}-[0-9]*")
_FILE = re.compile(rf"[0-9A-Za-z_-]{{8,64}}/([0-9a-f]{{{DIGITS}}})[0-9a-f]{{{32 - DIGITS}}}")
_STORE = re.compile(rf"[0-9a-f]{{{DIGITS}}}")
_STORE_FILE = "name"
_DRAWN = re.compile(r"\.[0-9a-f]{16}")  #: a name's file before it has its place
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_host(folder: Path) -> str:
    """Names the domain of a shared-memory folder: this boot of this machine, and the folder itself.

    A folder that isn't there has a name too; whoever writes to it gets the error.
    """
    try:
        info = folder.stat()
        place = f"{info.st_dev} {info.st_ino}"
    except OSError:
        place = str(folder.absolute())
    return blake2b(f"{_boot()} {place}".encode(), digest_size=DIGITS // 2).hexdigest()


def new_owner(folder: Path) -> str:
    """A fresh owner of an arena in this folder, see :attr:`adapters.arena.SharedMemory.prefix`."""
    return this_host(folder) + secrets.token_hex(DIGITS // 2)


def store_name(folder: Path) -> str:
    """Names a disk store for good, unlike a host, which is another after a restart of the machine.

    It is drawn when the folder is first used and kept in it. Raises OSError where the folder can't be
    written, ValueError where something else is in the name's place.
    """
    path = folder / _STORE_FILE
    if not path.exists():
        drawn = path.with_name(f".{secrets.token_hex(8)}")
        try:
            with drawn.open("x") as file:
                file.write(secrets.token_hex(DIGITS // 2))
                file.flush()
                os.fsync(file.fileno())  # else a power cut may leave an empty file in the name's place
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(drawn, path)
        finally:
            drawn.unlink(missing_ok=True)
    name = path.read_text()
    if not _STORE.fullmatch(name):
        raise ValueError(f"{path} holds no store's name; remove it")
    return name


def forget_store_name(folder: Path) -> None:
    """The folder is to go: takes the name out, which is nobody's if nothing else is there.

    And what was left by those who were killed while they drew one; who still does so draws again.
    """
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
        if all(name == _STORE_FILE or _DRAWN.fullmatch(name) for name in names):
            for name in names:
                (folder / name).unlink(missing_ok=True)


def host_of(place: str) -> str:
    """The host or store that a segment, an arena's prefix or a file of the disk store belongs to.

    "" where the name doesn't tell; such a thing is taken for local.
    """
    match = _ARENA.fullmatch(place) or _FILE.fullmatch(place)
    return match[1] if match is not None else ""


@functools.cache
def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
