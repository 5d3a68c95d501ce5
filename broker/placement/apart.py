"""A placer in a process of its own: what it needs is too heavy for the supervisor, and has threads."""

from __future__ import annotations

from collections.abc import Callable

from broker.child import Child

USAGE = 2  #: the exit code of a placer that can't work, and won't be able to
LONGER_S = 5.0  #: its workers are told to end when their time is over; after so much more it is killed


class Apart:
    """Keeps a placer's process alive.

    Args:
        name: What log lines call it.
        command: Its command line.
        say: Gets each line that it prints.
        give_up: Called when the first process finds that it can't work.
    """

    def __init__(
        self, name: str, command: list[str], say: Callable[[str], None], give_up: Callable[[], None]
    ) -> None:
        self._give_up = give_up
        self._ends = 0
        self._child = Child(name, command, say, self._is_hopeless)

    async def run(self) -> None:
        """See :class:`broker.placement.Placer`."""
        self._child.start()

    async def stop(self, patience_s: float) -> None:
        """See :class:`broker.placement.Placer`."""
        await self._child.stop(patience_s + LONGER_S)

    def kill(self) -> None:
        """See :class:`broker.placement.Placer`."""
        self._child.kill()

    def _is_hopeless(self, code: int) -> bool:
        """A later one is started again all the same: what it needs was there once, and may come back."""
        self._ends += 1
        if self._ends > 1 or code != USAGE:
            return False
        self._give_up()
        return True
