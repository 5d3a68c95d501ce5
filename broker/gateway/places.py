"""Where in a stream its reader is: what an event's id says, and what `after` asks for.

The events of one output of one choice come in the same order whoever makes them. How the outputs of a choice
interleave, and the choices, is chance. So a place is one count of events for each of these lanes, with dots
between them: "17" where there is one lane, else "3.5.2". What ends a whole stream counts in the first lane.
A stream of raw bytes has one lane, which counts bytes.
"""

from __future__ import annotations

import re

from broker.gateway.errors import ApiError

_PLACE = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})*")


class Place:
    """Counts what has been made so far, from the beginning, and knows what its reader has already.

    Args:
        lanes: How many there are.
        after: The reader's own place; absent: it has nothing.
    """

    def __init__(self, lanes: int, after: list[int] | None = None) -> None:
        self._counts = [0] * lanes
        self.after = after or [0] * lanes

    @classmethod
    def parse(cls, text: str, lanes: int) -> Place:
        """A reader's place in a stream. "" and "0" are its beginning. Raises ApiError (400)."""
        if text in ("", "0"):
            return cls(lanes)
        if not _PLACE.fullmatch(text) or text.count(".") != lanes - 1:
            form = "a number" if lanes == 1 else f"{lanes} numbers with dots between them"
            raise ApiError(f"after: not a place in this stream, which is {form}: {text[:80]!r}", "after")
        return cls(lanes, [int(count) for count in text.split(".")])

    @classmethod
    def latest(cls, places: list[Place]) -> Place:
        """The place of a reader who has been at all of these."""
        return cls(
            len(places[0].after), [max(counts) for counts in zip(*(p.after for p in places), strict=True)]
        )

    def step(self, lane: int) -> bool:
        """One more event of a lane. Whether it is new to the reader."""
        self._counts[lane] += 1
        return self._counts[lane] > self.after[lane]

    def has_some(self, lanes: range) -> bool:
        """Whether the reader has any event of these lanes."""
        return any(self.after[lane] for lane in lanes)

    def __str__(self) -> str:
        """The reader's place once it has all that was new to it so far."""
        return ".".join([str(max(pair)) for pair in zip(self._counts, self.after, strict=True)])
