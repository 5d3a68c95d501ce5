"""How many workers each stage should have. Whoever starts workers asks for it and carries it out.

Looked at in the tick alone, so a message costs nothing. A stage whose ``replicas`` are a number wants that
number for ever. One with bounds gets one more when more than ``queue_per_worker`` tasks per wanted worker
have waited for ``up_s``, and one less when nothing has waited and one of the wanted workers has had nothing
to do for ``down_s``; between two steps there are at least ``cooldown_s``. The queue is divided by the workers
that are wanted, not by those that are there: what loads its model already need not be asked for twice.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from pipelines.graph import Resources

if TYPE_CHECKING:
    from collections.abc import Iterable

    from broker.core.state import StageState


#: Why, before the first step
_RANGE = "the least"
_NUMBER = "a number in the pipeline"
_BY_HAND = "0 in the pipeline: only by hand"


class Scaler:
    """One stage's wanted number of workers, with the reason."""

    __slots__ = ("_bounds", "_idle_since", "_long_since", "_settings", "_stepped", "since", "wanted", "why")

    def __init__(self, resources: Resources) -> None:
        self._bounds = (resources.least, resources.most)
        self._settings = resources.scaling
        self._long_since = inf  #: since when the queue has been too long
        self._idle_since = inf  #: since when a worker has been one too many
        self._stepped = 0.0  #: the last step
        self.wanted = resources.least
        self.since: float | None = None  #: when it began to be wanted; None before the first look
        self.why = _RANGE if resources.least < resources.most else _NUMBER if resources.most else _BY_HAND

    @property
    def least(self) -> int:
        """The fewest there may be."""
        return self._bounds[0]

    @property
    def most(self) -> int:
        """The most there may be."""
        return self._bounds[1]

    def look(self, now: float, *, queued: int, busy: int, guardians: int) -> None:
        """Decides anew.

        Args:
            now: The tick's time.
            queued: Tasks that wait for a worker.
            busy: Workers that have a task.
            guardians: Those that keep a worker. At the first look after a broker's restart they are what its
                predecessor had wanted, so what works goes on.
        """
        if self.since is None:
            self.since, self._stepped = now, now - self._settings.cooldown_s
            if self.least < guardians and self.least < self.most:
                self.wanted, self.why = min(guardians, self.most), "there when the broker began"
        if self.least == self.most:
            return
        settings, wanted = self._settings, self.wanted
        too_long, idle = queued > settings.queue_per_worker * wanted, not queued and busy < wanted
        self._long_since = min(self._long_since, now) if too_long else inf
        self._idle_since = min(self._idle_since, now) if idle else inf
        if queued and not wanted:
            self._step(now, 1, f"{queued} queued, and no worker was wanted")
        elif now - self._stepped < settings.cooldown_s:
            return
        elif now - self._long_since >= settings.up_s and wanted < self.most:
            self._step(now, 1, f"{queued} queued for {wanted}, for {now - self._long_since:.1f} s")
        elif now - self._idle_since >= settings.down_s and wanted > self.least:
            self._step(now, -1, f"{busy} of {wanted} busy, for {now - self._idle_since:.1f} s")

    def _step(self, now: float, step: int, why: str) -> None:
        self.wanted += step
        self.since = self._stepped = now
        self.why = why


def look(stages: Iterable[StageState], now: float) -> None:
    """Decides for each stage; called from the tick."""
    for stage in stages:
        busy = sum(bool(worker.tasks) for worker in stage.workers.values())
        stage.scaler.look(now, queued=stage.scheduler.length, busy=busy, guardians=len(stage.guardians))
