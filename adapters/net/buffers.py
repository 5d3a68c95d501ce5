"""Memory for blocks that land, used again when nobody looks at it any longer.

Fresh memory costs more than the bytes that are put into it: the kernel hands out zeroed pages one by one, a
quarter of a second of work for each GB, as much as a plain TCP socket costs on both ends together.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import Any

import numpy as np

SMALLEST = 256 << 10  #: bytes; for less, the allocator keeps memory of its own
KEPT = 256 << 20  #: bytes that wait for their next use, at most
KEPT_S = 10.0  #: and for how long
_ROUND = 1 << 20

_Memory = np.ndarray[Any, np.dtype[np.uint8]]


class Buffers:
    """Lends memory to one thread; views of it may die on any."""

    def __init__(self) -> None:
        self._returned: deque[_Memory] = deque()  #: all that finalizers touch
        self._lent = 0
        self._free: list[tuple[float, _Memory]] = []  #: since when, the longest first

    @property
    def lent(self) -> int:
        """How many buffers are in use."""
        self._collect()
        return self._lent

    @property
    def free_bytes(self) -> int:
        """How much waits for its next use."""
        self._collect()
        return sum(memory.nbytes for _, memory in self._free)

    def take(self, nbytes: int) -> memoryview:
        """A writable buffer of that size, with anything in it. It comes back when its last view is gone."""
        if nbytes < SMALLEST:
            return np.empty(nbytes, np.uint8).data
        self._collect()
        fitting = [entry for entry in self._free if nbytes <= entry[1].nbytes <= 2 * nbytes + _ROUND]
        if fitting:
            entry = min(fitting, key=lambda entry: entry[1].nbytes)
            self._free = [other for other in self._free if other is not entry]
            memory = entry[1]
        else:
            memory = np.empty(-(-nbytes // _ROUND) * _ROUND, np.uint8)
        self._lent += 1
        # An array whose own base is no array: NumPy keeps it alive for every view that is made of it.
        root = np.frombuffer(memory.data[:nbytes], np.uint8)
        weakref.finalize(root, self._returned.append, memory).atexit = False
        return root.data

    def trim(self, kept_s: float = KEPT_S) -> None:
        """Lets go of what has waited for so long."""
        self._collect()
        now = time.monotonic()
        self._free = [entry for entry in self._free if now - entry[0] < kept_s]

    def _collect(self) -> None:
        now = time.monotonic()
        while self._returned:
            self._lent -= 1
            self._free.append((now, self._returned.popleft()))
        total = sum(memory.nbytes for _, memory in self._free)
        while total > KEPT:
            total -= self._free.pop(0)[1].nbytes
