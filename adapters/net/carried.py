"""What has come from other hosts, counted by the way it came: so that nobody has to believe a setting."""

from __future__ import annotations

import logging
from collections import Counter

log = logging.getLogger(__name__)


class Carried:
    """One process's counts. The log hears of the first block by each way from each host, and of the sums.

    ``blocks`` and ``nbytes``: way ("zmq", "ucx", "mooncake") -> how many.
    """

    def __init__(self) -> None:
        self.blocks: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self._told: set[tuple[str, str]] = set()

    def add(self, way: str, host: str, nbytes: int) -> None:
        """A block is here whole. ``host``: the address that it was asked for at."""
        self.blocks[way] += 1
        self.nbytes[way] += nbytes
        if (way, host) not in self._told:
            self._told.add((way, host))
            log.info("blocks from %s come by %s", host, way)

    def sum_up(self) -> None:
        """Tells the log what has come, if anything has, and begins to count anew."""
        ways = [f"{self.blocks[way]} by {way} ({self.nbytes[way]:,} bytes)" for way in sorted(self.blocks)]
        if ways:
            log.info("blocks that came from other hosts: %s", ", ".join(ways))
        self.blocks.clear()
        self.nbytes.clear()
