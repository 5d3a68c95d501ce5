"""What an engine or a client must remember, to introduce itself to a broker that was restarted.

No I/O, no clock: whoever owns a session calls it with each message that comes or goes, from one thread. The
order of an introduction is in :mod:`broker.protocol`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Literal

from adapters.handle import BlockId, Chunk, Handle
from broker.protocol import Assign, Checkpoint, Emit, Failed, Finish, Input, Lease, Resync, Who

Result = Emit | Finish | Failed | Checkpoint
Attempt = tuple[int, int, int]  #: (request, stage, attempt)

DEAF = 50  #: a broker that has asked so often since our introduction has not heard it


class Session:
    """A peer's side of its acquaintance with the broker: which boot it has met, whose memory lies where."""

    def __init__(self, boot: int = 0) -> None:
        self.boot = boot  #: the broker process that we have introduced ourselves to
        self._gone = False  #: it has told us that it had given us up, and we have not met since
        self._ignored = 0  #: how often it has said the same since
        self._holds: Counter[BlockId] = Counter()
        self._lent: dict[BlockId, None] = {}

    def introduce(self, who: Who) -> Literal["ignore", "introduce", "gone"]:
        """What to do about a Who. One answer per boot is enough, unless it was lost on its way.

        A broker asks until it has our introduction; one that goes on asking never got it, or not whole.
        """
        same = (who.boot, who.gone) == (self.boot, self._gone)
        self.boot, self._gone = who.boot, who.gone
        if same and self._ignored < DEAF:
            self._ignored += 1
            return "ignore"
        self._ignored = 0
        return "gone" if who.gone else "introduce"

    def met(self, boot: int) -> None:
        """This broker process has answered us, so it knows us."""
        self.boot, self._gone, self._ignored = boot, False, 0

    # --- blocks

    def received(self, handles: Iterable[Handle]) -> None:
        """A message has come with handles of others' blocks; each counts as often as it comes."""
        for handle in handles:
            self._holds[handle.block] += 1

    def released(self, blocks: Iterable[BlockId]) -> None:
        """A Release of these goes out."""
        for block in blocks:
            if self._holds[block] <= 1:
                del self._holds[block]
            else:
                self._holds[block] -= 1

    def lend(self, handles: Iterable[Handle]) -> None:
        """A message with handles of our own blocks goes out."""
        for handle in handles:
            self._lent[handle.block] = None

    def freed(self, blocks: Iterable[BlockId]) -> None:
        """The broker gives blocks of ours back."""
        for block in blocks:
            self._lent.pop(block, None)

    def resync(self) -> Resync:
        """The end of an introduction."""
        return Resync(list(self._holds.elements()), list(self._lent), self.boot)

    def begin_anew(self) -> None:
        """The broker has given us up: nothing we hold is ours to use, nothing we lent will be freed."""
        self._holds.clear()
        self._lent.clear()


class EngineSession(Session):
    """An engine's: also its leases, and the results that the broker may not have read."""

    def __init__(self, boot: int = 0) -> None:
        super().__init__(boot)
        self.results_seen = 0  #: results that the broker has journalled: those before the unseen
        self._unseen: deque[Result] = deque()
        self._leases: dict[Attempt, dict[int, tuple[int, bool]]] = {}  #: edge -> chunks received, closed

    # --- what comes

    def assigned(self, message: Assign) -> None:
        """A task has come."""
        lease: dict[int, tuple[int, bool]] = {}
        for item in message.inputs:
            lease[item.edge] = (len(item.chunks), item.closed)
            self._hold(item.chunks)
        if message.resume is not None and message.resume.checkpoint is not None:
            self._hold([message.resume.checkpoint])
        self._leases[message.request, message.stage, message.attempt] = lease

    def fed(self, message: Input) -> bool:
        """More of a task's inputs has come, perhaps after its end. False: some are missing before these.

        That happens where the connection broke. They don't count then: should a broker be restarted before
        this process has ended, it must send all that is missing.
        """
        item = message.input
        self._hold(item.chunks)
        lease = self._leases.get((message.request, message.stage, message.attempt))
        if lease is None:
            return True
        count, closed = lease.get(item.edge, (0, False))
        if message.first != count:
            return False
        lease[item.edge] = (count + len(item.chunks), closed or item.closed)
        return True

    def _hold(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if chunk.handles:
                self.received(chunk.handles)

    def leases(self) -> list[Lease]:
        """For Ready: the tasks in hand, and those whose end the broker may not have read."""
        return [
            Lease(*name, [(edge, count, closed) for edge, (count, closed) in inputs.items()])
            for name, inputs in self._leases.items()
        ]

    # --- what goes

    def sent(self, message: Result) -> None:
        """A result goes out. It is kept, and may still be changed by its sender while it waits to leave."""
        self._unseen.append(message)
        if type(message) is Emit or type(message) is Checkpoint:
            self.lend(message.chunk.handles)

    def seen(self, results: int) -> None:
        """The broker has journalled so many of our results, counted from our start."""
        for _ in range(min(results - self.results_seen, len(self._unseen))):
            message = self._unseen.popleft()
            self.results_seen += 1
            if _ends(message):
                self._leases.pop((message.request, message.stage, message.attempt), None)

    def unseen(self) -> list[Result]:
        """What to send again, in order, to a broker that was restarted."""
        return list(self._unseen)


def _ends(message: Result) -> bool:
    """Whether nothing of the attempt follows this result."""
    if type(message) is Emit:
        return message.chunk.last
    return type(message) is not Checkpoint
