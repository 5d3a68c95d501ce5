"""A thread that waits for descriptors, and is woken by others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress


class Woken:
    """The thread, and a descriptor for its poll that is readable once it was woken.

    Args:
        name: Of the thread.
        run: Its life, which ends soon after ``closing`` is set.
    """

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self.closing = False
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def wake(self) -> None:
        """From any thread, until :meth:`close`."""
        os.eventfd_write(self.fd, 1)

    def slept(self) -> None:
        """On the thread, after its poll: the next one waits again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def end(self) -> bool:
        """Has the thread end and waits for that. False: somebody has done so already."""
        if self.closing:
            return False
        self.closing = True
        self.wake()
        self._thread.join()
        return True

    def close(self) -> None:
        """After the end, once nobody wakes it any more."""
        self._thread.join()
        os.close(self.fd)
