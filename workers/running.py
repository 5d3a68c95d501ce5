"""One job in hand: which attempt it is, what it has emitted, and how far it may go."""

from __future__ import annotations

import asyncio

from adapters.handle import Chunk, size_of
from broker.protocol import Assign, Emit
from workers.engine import Job
from workers.inputs import Inputs


class Running:
    """What a worker process knows of one attempt."""

    __slots__ = (
        "_checkpoints",
        "_granted",
        "_nbytes",
        "_wake",
        "assign",
        "begun",
        "cancelled",
        "inputs",
        "job",
        "last",
        "seq",
        "task",
    )

    def __init__(self, assign: Assign) -> None:
        self.assign = assign
        self.seq = 0 if assign.resume is None else assign.resume.emitted  #: of the next chunk
        self.last: Emit | None = None  #: the newest chunk, while it may still wait in the outbox
        self.inputs: Inputs | None = None  #: None when it has ended
        self.begun = False  #: its task has run its first step
        self.cancelled = False
        self.job: Job | None = None  #: None until what it resumes from is here
        self.task: asyncio.Task[None] | None = None
        self._checkpoints: list[Chunk] = []  #: the last two: the broker may not have read the last one yet
        self._granted = assign.granted
        self._nbytes = 0  #: of this attempt's chunks so far
        self._wake: asyncio.Future[None] | None = None

    @property
    def name(self) -> tuple[int, int, int]:
        """(request, stage, attempt), the head of every message about it."""
        return (self.assign.request, self.assign.stage, self.assign.attempt)

    def emitted(self, chunk: Chunk) -> Emit:
        """The message for its next chunk."""
        self.seq += 1
        self._nbytes += size_of(chunk)
        self.last = Emit(*self.name, chunk)
        return self.last

    def replaced(self, checkpoint: Chunk) -> Chunk | None:
        """Takes note of a checkpoint; returns one that is surely replaced by now."""
        self._checkpoints.append(checkpoint)
        return self._checkpoints.pop(0) if len(self._checkpoints) > 2 else None

    async def granted(self) -> None:
        """Waits until the next chunk may go: its consumers have taken enough of those before it."""
        while self._limited:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    def grant(self, chunks: int, nbytes: int) -> None:
        """It may go so far, see :class:`broker.protocol.Grant`; never less far than before."""
        self._granted = max(chunks, self._granted[0]), max(nbytes, self._granted[1])
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    @property
    def _limited(self) -> bool:
        return self.seq >= self._granted[0] or self._nbytes >= self._granted[1]
