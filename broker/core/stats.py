"""Counters and histograms that the core fills; the shell only reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

import msgspec

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


class StageStats(msgspec.Struct):
    """One stage's figures since the broker's start."""

    wait: Histogram  #: from queued to assigned
    service: Histogram  #: from assigned to ended
    tasks: Counter[str]  #: by how they ended: done, failed, cancelled; and attempts, redelivered, deaths
    chunks: int = 0


def new_stage_stats() -> StageStats:
    """Empty figures."""
    return StageStats(Histogram(), Histogram(), Counter())
