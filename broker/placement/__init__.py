"""Starting the workers of all stages, as many as the broker wants, and ending those that are too many."""

from __future__ import annotations

from typing import Protocol


class Placer(Protocol):
    """Where workers run: on this machine (:mod:`.local`), or on a cluster (:mod:`.apart`)."""

    async def run(self) -> None:
        """Keeps as many as the broker wants. May end before it is cancelled, and they are kept anyway."""
        ...

    async def stop(self, patience_s: float) -> None:
        """Workers finish what they hold; those that take longer are killed."""
        ...

    def kill(self) -> None:
        """All workers end now."""
        ...
