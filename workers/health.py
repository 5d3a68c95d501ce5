"""A file that says how a worker is, for probes that can't ask it: those of containers."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class HealthFile:
    """One word in a file that is written again every second, so its age tells whether its writer lives.

    ``starting``: the engine is not ready yet, or again. ``ready``: the broker gives it work. ``no-broker``:
    the broker has been silent. ``draining``: it finishes what it holds.

    Args:
        path: The file's. Its folder is made, and it goes when :meth:`remove` is called.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = path.with_name(f".{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, state: str) -> None:
        """Says it now. A folder that has gone, or a full disk, leaves the file as it is: it grows old."""
        with suppress(OSError):
            self._next.write_text(f"{state}\n")
            self._next.replace(self._path)

    def remove(self) -> None:
        """The worker has left."""
        self._path.unlink(missing_ok=True)
        self._next.unlink(missing_ok=True)
