"""What the engines of these tests have in common: nothing is loaded, and nothing let go."""

from __future__ import annotations

from pipelines.graph import Stage


class BareEngine:
    """Lacks ``run`` and ``resumes``."""

    def __init__(self, stage: Stage, *, device: str) -> None:
        pass

    async def start(self) -> None:
        """Nothing to load."""

    async def stop(self) -> None:
        """Nothing to let go."""
