"""A request's outputs on their way to its caller: what has come, what was taken, and what continues it.

No I/O, no clock: a client calls it with each chunk that comes or goes, from one thread.
"""

from __future__ import annotations

from collections import deque

from adapters.chunk import Chunk
from adapters.handle import size_of
from broker.protocol import Attach, Submit, Taken
from pipelines.graph import Limits


class Receiving:
    """What a client must remember of a request.

    Args:
        opening: The message that opens it.
        limits: Of its pipeline.
    """

    def __init__(self, opening: Submit | Attach, limits: Limits) -> None:
        self.opening = opening
        self.limits = limits
        self.accepted = False  #: the broker knows it
        self.ended = False  #: nothing more comes from the broker
        self.received = dict(opening.received)  #: output -> chunks that have come
        self.waiting: deque[tuple[str, Chunk]] = deque()  #: not taken yet
        self._unmeasured = 0  #: of those that wait, how many the broker takes for taken
        self._taken: dict[str, tuple[int, int]] = {}  #: output -> (chunks, bytes) not told to the broker yet

    def push(self, output: str, chunk: Chunk) -> bool:
        """A chunk has come. False: it had come before, or one before it was lost: both come again."""
        if chunk.seq != self.received.get(output, 0):
            return False
        self.received[output] = chunk.seq + 1
        self.waiting.append((output, chunk))
        return True

    def take(self) -> tuple[str, Chunk, Taken | None]:
        """The next of those that wait, for the caller; and what to tell the broker of it.

        It hears each time that a quarter of what may wait has gathered.
        """
        output, chunk = self.waiting.popleft()
        return output, chunk, self._measured(output, chunk)

    def _measured(self, output: str, chunk: Chunk) -> Taken | None:
        if self._unmeasured:
            self._unmeasured -= 1
            return None
        if self.ended:
            return None
        chunks, nbytes = self._taken.get(output, (0, 0))
        chunks, nbytes = chunks + 1, nbytes + size_of(chunk)
        if chunks * 4 < self.limits.ahead_chunks and nbytes * 4 < self.limits.ahead_mb * 2**20:
            self._taken[output] = (chunks, nbytes)
            return None
        self._taken[output] = (0, 0)
        return Taken(self.opening.tag, output, chunks, nbytes)

    # --- a broker that comes back

    @property
    def holds(self) -> bool:
        """Whether chunks with blocks wait for the caller."""
        return any(chunk.handles for _, chunk in self.waiting)

    def reopen(self) -> Submit | Attach:
        """The message that continues it at a broker that was restarted, which takes all for taken.

        What has ended is kept there for us until we have read it, but is not to begin anew.
        """
        if self.ended:
            return Attach(self.opening.tag, self.opening.name, dict(self.received))
        self._unmeasured = len(self.waiting)
        self._taken.clear()
        self.opening.received = dict(self.received)
        return self.opening

    def reattach(self) -> Submit | Attach | None:
        """The message that continues it at a broker that had given us up; None: nothing can.

        Blocks that we have not looked at belong to others by now: they must come again, also after the end.
        The same goes for what we lent, so nothing that was given in blocks can be submitted again.
        """
        self.ended = False
        for output, chunk in reversed(self.waiting):
            self.received[output] = chunk.seq
        self.waiting.clear()
        if type(self.opening) is Submit and self.accepted:
            self.opening = Attach(self.opening.tag, self.opening.name)
        return None if self._lends() else self.reopen()

    def resubmit(self) -> Submit | Attach | None:
        """The message that begins it at a broker that knows nothing; None: it has to end."""
        begun = any(self.received.values()) or type(self.opening) is Attach
        return None if begun or self._lends() else self.reopen()

    def _lends(self) -> bool:
        opening = self.opening
        return type(opening) is Submit and any(c.handles for given in opening.given.values() for c in given)
