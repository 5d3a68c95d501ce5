"""Which rows of which jobs the next step computes, and whose memory goes when there is too little."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from workers.engines.ar.blocks import Blocks
from workers.engines.ar.sequence import Sequence


class Piece(NamedTuple):
    """Rows ``start`` to ``stop`` of one job."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """It ends with the row that makes the next token."""
        return self.stop == self.sequence.total


class Scheduler:
    """Continuous batching with chunked prompts, oldest job first.

    A step takes the next row of every job that has one, then as many rows of prompts as fit. A job gets the
    blocks for its prompt when it is admitted and further ones as it grows. When there are none, the newest
    job loses its own; it is admitted again later, and its rows, answer included, are computed anew. The
    oldest job never loses any, and no job is longer than the whole memory, so each comes to its end.

    Args:
        blocks: The memory.
        max_sequences: Jobs that hold memory at once.
        max_rows: Rows of one step; not less than ``max_sequences``.
        restore: Called with each job that was given its memory: fills in rows that need not be computed.
        wipe: Called with the blocks of a job that loses them in the middle of its prompt: they may hold NaN,
            which whoever gets them next would read beyond its own rows.
        coming: Whether one of these older jobs is computing rows that ``restore`` will know for this one.
    """

    def __init__(
        self,
        blocks: Blocks,
        max_sequences: int,
        max_rows: int,
        *,
        restore: Callable[[Sequence], None] | None = None,
        wipe: Callable[[list[int]], None] | None = None,
        coming: Callable[[Sequence, list[Sequence]], bool] | None = None,
    ) -> None:
        self.blocks = blocks
        self.running: list[Sequence] = []  #: hold memory; oldest first
        self.waiting: list[Sequence] = []  #: hold none; oldest first
        self.preemptions = 0
        self._max_sequences = max_sequences
        self._max_rows = max_rows
        self._restore = restore
        self._wipe = wipe
        self._coming = coming
        self._arrivals = 0

    def add(self, sequence: Sequence) -> None:
        """A new job."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The job is over. Nothing happens if it is gone already."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    @property
    def scattered(self) -> bool:
        """Some of the running jobs have something to compute, and some have not.

        Those whose tokens nobody takes don't count: a caller that reads slowly is no company to wait for.
        """
        wanted = [one for one in self.running if one.wanted]
        return 0 < sum(one.pending > 0 for one in wanted) < len(wanted)

    def plan(self) -> list[Piece]:
        """The next step: jobs with a single row first. Empty when there is nothing to do now."""
        pieces: dict[Sequence, Piece] = {}
        room = self._max_rows
        for sequence in sorted(
            (one for one in self.running if one.ready), key=lambda one: (one.pending > 1, one.arrival)
        ):
            if not sequence.blocks or not room:
                continue
            stop = sequence.computed + min(sequence.pending, room)
            for victim in self._grow(sequence, stop):
                if lost := pieces.pop(victim, None):
                    room += lost.stop - lost.start
            if sequence.blocks:
                pieces[sequence] = Piece(sequence, sequence.computed, stop)
                room -= stop - sequence.computed
        for sequence in self._admissible():
            if not room:
                break
            self._admit(sequence)
            start = sequence.computed
            stop = start + min(sequence.pending, room)
            pieces[sequence] = Piece(sequence, start, stop)
            room -= stop - start
        return sorted(pieces.values(), key=lambda piece: piece.stop - piece.start > 1)

    def _grow(self, sequence: Sequence, rows: int) -> list[Sequence]:
        """Gives a job blocks for so many rows. Returns the jobs that lost theirs, perhaps itself."""
        victims: list[Sequence] = []
        missing = self.blocks.needed(rows) - len(sequence.blocks)
        while missing > self.blocks.free and sequence not in victims:
            victim = self.running.pop()
            self._release(victim)
            self.preemptions += 1
            victims.append(victim)
            self.waiting.append(victim)
            self.waiting.sort(key=lambda one: one.arrival)
        if missing > 0 and sequence not in victims:
            sequence.blocks += self.blocks.take(missing)
        return victims

    def _admissible(self) -> list[Sequence]:
        """Those that wait and now fit, oldest first; a younger one never overtakes one that is too long.

        Each running job must keep a block to grow into, lest the new one lose its memory at once.
        """
        fit: list[Sequence] = []
        free = self.blocks.free
        for sequence in self.waiting:
            running = len(self.running) + len(fit)
            if running == self._max_sequences:
                break
            if not sequence.ready or (
                self._coming is not None and self._coming(sequence, [*self.running, *fit])
            ):
                continue
            free -= self.blocks.needed(sequence.pending)
            if free < running:
                break
            fit.append(sequence)
        return fit

    def _admit(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.running.sort(key=lambda one: one.arrival)
        sequence.blocks = self.blocks.take(self.blocks.needed(sequence.pending))
        if self._restore is not None:
            self._restore(sequence)

    def _release(self, sequence: Sequence) -> None:
        if self._wipe is not None and not sequence.sound:
            self._wipe(sequence.blocks)
        sequence.sound = True
        self.blocks.give_back(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
