"""Counters and histograms that the core fills; the shell only reads them."""

from __future__ import annotations

from bisect import bisect_left

#: Upper bounds in seconds, fine enough for hops of 0.1 ms and for videos of ten minutes.
BUCKETS = (
    0.0001,
    0.0005,
    0.001,
    0.005,
    0.01,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    600.0,
)

SMOOTH = 0.1  #: weight of the newest value in moving averages
STALE_S = 60.0  #: without a task that was done for so long, what they took is not known any more


class Histogram:
    """Counts per bucket (the last one is unbounded), their sum and number."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds


class StageStats:
    """One stage's figures since the broker's start. Every attempt ends in one of the ways counted here."""

    __slots__ = (
        "_last_done",
        "attempts",
        "busy_s",
        "cancelled",
        "chunks",
        "deaths",
        "done",
        "failed",
        "lost_chunks",
        "lost_s",
        "pace",
        "redelivered",
        "service",
        "usual",
        "wait",
    )

    def __init__(self) -> None:
        self.wait = Histogram()  #: from queued to assigned
        self.service = Histogram()  #: from assigned to done
        self.attempts = 0
        self.done = 0
        self.failed = 0
        self.cancelled = 0
        self.redelivered = 0
        self.deaths = 0  #: attempts that ended with their worker
        self.chunks = 0
        self.lost_chunks = 0  #: that were in the making when an attempt broke off, one for each at most
        self.busy_s = 0.0  #: seconds of all attempts
        self.lost_s = 0.0  #: of these, after the last chunk of attempts that came to nothing
        self.usual = 0.0  #: seconds from assigned to done, a moving average
        self.pace = 0.0  #: seconds between two tasks that are done while others wait, likewise
        self._last_done = 0.0

    def finished(self, now: float, seconds: float, *, waiting: int) -> None:
        """A task is done after so many seconds, with so many others in the queue."""
        self.service.observe(seconds)
        self.done += 1
        self.busy_s += seconds
        self.usual += (seconds - self.usual) * (SMOOTH if self.expected(now) else 1.0)
        if waiting:
            self.pace += (now - self._last_done - self.pace) * SMOOTH
        self._last_done = now

    def expected(self, now: float) -> float:
        """Seconds that a task takes, as far as that is known; 0: it is not, or was so long ago.

        Requests that are refused because of it bring no newer figure: a slow start would count for ever.
        """
        return self.usual if now - self._last_done <= max(STALE_S, 2 * self.usual) else 0.0

    def counts(self) -> dict[str, int]:
        """How often things happened to tasks, by name."""
        names = ("attempts", "done", "failed", "cancelled", "redelivered", "deaths")
        return {name: getattr(self, name) for name in names}
