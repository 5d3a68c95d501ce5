"""How far a task may be ahead of those that consume its output.

Each streaming consumer, and the caller of an output, has a :class:`Gauge`. A task may emit until the slowest
of them is ``ahead_chunks`` or ``ahead_mb`` behind; then it waits in its worker for a Grant, so a slow caller
slows the last stage, that one slows the stage before, and so on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pipelines.graph import Limits

UNLIMITED = (1 << 60, 1 << 60)

#: (chunks by their seq, bytes of this attempt), as in :class:`broker.protocol.Grant`
Granted = tuple[int, int]


class Gauge:
    """What one consumer was given and has not taken yet."""

    __slots__ = ("_attempt", "_sizes", "nbytes", "open", "taken")

    def __init__(self, *, open: bool) -> None:
        self.taken = 0  #: chunks, by its most advanced attempt
        self.nbytes = 0  #: of chunks that wait for it
        self.open = open  #: False: it needs no more, or nobody is there who could
        self._sizes: deque[int] = deque()
        self._attempt = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, nbytes: int) -> None:
        """One more chunk for it."""
        self._sizes.append(nbytes)
        self.nbytes += nbytes

    def begin(self, taken: int = 0) -> None:
        """Another attempt of the consumer, which starts from its first chunk."""
        self._attempt = taken

    def clear(self) -> None:
        """Nothing waits for it."""
        self._sizes.clear()
        self.nbytes = 0

    def take(self, chunks: int) -> bool:
        """The present attempt has taken so many more. Whether that is progress."""
        self._attempt += chunks
        new = min(self._attempt - self.taken, len(self._sizes))
        for _ in range(new):
            self.nbytes -= self._sizes.popleft()
        self.taken += max(new, 0)
        return new > 0

    def behind(self, limits: Limits) -> bool:
        """Whether so much waits for it that it would have said more, had it taken more."""
        return len(self._sizes) * 4 > limits.ahead_chunks or self.nbytes * 4 > limits.ahead_mb * 2**20


def first_grant(limits: Limits) -> Granted:
    """How far a task may go that has emitted nothing."""
    return limits.ahead_chunks, int(limits.ahead_mb * 2**20)


def granted(gauges: Iterable[Gauge], limits: Limits, boost: int, emitted_bytes: int) -> Granted:
    """How far an attempt may go that has emitted so many bytes.

    ``boost`` multiplies the limits, where a graph would stand still otherwise.
    """
    waiting = [gauge for gauge in gauges if gauge.open]
    if not waiting:
        return UNLIMITED
    chunks = min([gauge.taken for gauge in waiting]) + limits.ahead_chunks * boost
    free = int(limits.ahead_mb * 2**20) * boost - max([gauge.nbytes for gauge in waiting])
    return chunks, emitted_bytes + free
