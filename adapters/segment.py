"""One file of shared memory, from its owner's side: made safely, locked for life, laid out in blocks.

A segment is a file ``omni-<run>-<owner>-<n>`` in the shared-memory folder. Its pages are reserved when it is
made, so a full tmpfs is an error and never SIGBUS. The owner holds an exclusive flock on it: whoever gets
that lock knows that the owner is gone. Its size never changes, so a reader's bounds check stays true.

Each block is a header of 64 bytes and the tensor's bytes. The header repeats what the handle says, so that a
reader can tell a handle of an earlier use of the same place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import struct
from pathlib import Path

from adapters.allocator import ALIGNMENT, Allocator, aligned
from adapters.handle import ArenaFull

HEADER = struct.Struct("<8sQQ")  #: magic, generation (0: free), bytes of the tensor
HEADER_SIZE = ALIGNMENT
MAGIC = b"omniblk1"

RUN = re.compile(r"[0-9a-f]{16}")
OWNER = re.compile(r"[0-9a-f]{8,32}")
SEGMENT = re.compile(r"omni-[0-9a-f]{16}-[0-9a-f]{8,32}-[0-9]{1,9}")

assert HEADER.size <= HEADER_SIZE


def shm_dir() -> Path:
    """The shared-memory folder: ``OMNI_SHM_DIR``, else /dev/shm."""
    return Path(os.environ.get("OMNI_SHM_DIR") or "/dev/shm")


def block_size(nbytes: int) -> int:
    """What a tensor of so many bytes takes up in a segment."""
    return HEADER_SIZE + aligned(max(nbytes, 1))


class Segment:
    """A segment of our own. Not thread-safe, but distinct blocks may be written at the same time."""

    def __init__(self, path: Path, size: int) -> None:
        """Makes the file. Raises :class:`ArenaFull` when the folder lacks space, OSError for the rest."""
        self.path = path
        self.size = size
        self._lock_fd = -1
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)  # whatever the umask
            # The lock sits on an open file of its own: the mapping keeps a copy of `fd` that a forked
            # child could not close, and with it the lock would outlive us.
            self._lock_fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "swept between creation and lock", str(path))
            os.posix_fallocate(fd, 0, size)
            # Writing would fault in one page after the other; readers are served 16 pages a fault.
            self.memory = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException as error:
            self.unlink()
            self.unlock()
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise ArenaFull(f"no space for {size:,} bytes in {path.parent}: {error.strerror}") from error
            raise
        finally:
            os.close(fd)
        self.room = Allocator(size)
        self._generation = 0
        self._blocks: dict[int, int] = {}  # offset of the tensor -> generation

    @property
    def blocks(self) -> int:
        """How many blocks are in use."""
        return len(self._blocks)

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """(offset, generation) of a new block for a tensor of so many bytes, or None without room."""
        start = self.room.take(block_size(nbytes))
        if start is None:
            return None
        self._generation += 1
        HEADER.pack_into(self.memory, start, MAGIC, self._generation, nbytes)
        offset = start + HEADER_SIZE
        self._blocks[offset] = self._generation
        return offset, self._generation

    def give_back(self, offset: int, generation: int) -> bool:
        """Frees a block; False when that block isn't in use (or is, by a later generation)."""
        if self._blocks.get(offset) != generation:
            return False
        del self._blocks[offset]
        start = offset - HEADER_SIZE
        HEADER.pack_into(self.memory, start, MAGIC, 0, 0)
        self.room.give_back(start)
        return True

    def discard(self) -> None:
        """Unlinks the file and lets it go; readers keep what they have mapped.

        Without a block in use the memory is given back even if a reader still caches its mapping.
        """
        self.unlink()
        if not self._blocks:
            with contextlib.suppress(OSError):  # not every file system can punch holes
                self.memory.madvise(mmap.MADV_REMOVE)
        self.let_go()

    def let_go(self) -> None:
        """Ends our use of the file, which stays as a dead owner's does."""
        with contextlib.suppress(BufferError):  # a put of another thread; the mapping goes with its end
            self.memory.close()
        self.unlock()

    def unlink(self) -> None:
        """Removes the name. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def unlock(self) -> None:
        """Gives the lock up (in a forked child: our copy of it). Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
