"""Workers on this machine: a guardian process for each."""

from __future__ import annotations

import asyncio
import socket
from asyncio.subprocess import DEVNULL
from collections.abc import Callable

from adapters.process import dies_with_parent, end_group, python
from broker.child import Child
from broker.placement.roster import Guardian, Post, Roster, posts
from pipelines.devices import gpu_count, place
from pipelines.graph import Pipeline
from pipelines.models import list_models

PULL_RETRY_S = 30.0
LONGER_S = 5.0  #: a guardian that drains ends by itself; after so much more it is killed


class Local:
    """Keeps workers, as many as the broker wants.

    Args:
        pipelines: Whose.
        address: The broker's.
        log_level: Of the workers.
        say: Gets each line that they print.
    """

    def __init__(
        self, pipelines: list[Pipeline], address: str, log_level: str, say: Callable[[str], None]
    ) -> None:
        self._address = address
        self._log_level = log_level
        self._say = say
        stages = posts(pipelines)
        devices = place([post.stage for post in stages], gpu_count())
        self._devices = dict(zip((post.label for post in stages), devices, strict=True))
        self._missing = {info.model.name for info in list_models() if not info.cached}
        self._waiting: dict[str, list[Worker]] = {}  #: model that is being pulled -> whom for
        self._pulls: set[asyncio.Task[None]] = set()
        self._roster: Roster[Worker] = Roster(stages, self._hire)
        resources = [post.stage.resources for post in stages]
        self._scales = any(one.least < one.most for one in resources)

    async def run(self) -> None:
        """Starts all workers, those whose model is not here yet as soon as it has been pulled.

        Where no stage has a range of workers, that is all; else until cancelled.
        """
        self._roster.begin()
        if not self._scales:
            return
        async for _ in self._roster.following(self._address):
            pass

    async def stop(self, patience_s: float) -> None:
        """Workers finish what they hold; those that take longer are killed."""
        for pull in self._pulls:
            pull.cancel()
        await asyncio.gather(*(worker.leave(patience_s) for worker in self._roster.workers()))
        await asyncio.gather(*self._pulls, return_exceptions=True)

    def kill(self) -> None:
        """All workers end now."""
        for worker in self._roster.workers():
            worker.child.kill()

    def _hire(self, post: Post, index: int) -> Worker:
        where = ("--pipeline", post.pipeline, "--stage", post.name, "--broker", self._address)
        device = ("--device", self._devices[post.label][index])
        resources, drain_s = post.stage.resources, post.stage.retry.timeout_s
        patience: tuple[str, ...] = ("--patience", "60")
        if resources.least < resources.most:  # one that is too many may take as long as its tasks
            patience += ("--drain-s", str(drain_s))
        command = python("workers.cli", *where, *device, "--log-level", self._log_level, *patience)
        worker = Worker(Child(f"a guardian of {post.label}", command, self._say), drain_s)
        if post.stage.model in self._missing:
            self._pull_for(post.stage.model, worker)
        else:
            worker.child.start()
        return worker

    def _pull_for(self, model: str, worker: Worker) -> None:
        if model in self._waiting:
            self._waiting[model].append(worker)
            return
        self._waiting[model] = [worker]
        pull = asyncio.ensure_future(self._pull_then_start(model))
        self._pulls.add(pull)

    async def _pull_then_start(self, model: str) -> None:
        """Fetches a model in a process of its own, and tries again when that fails."""
        while True:
            pull = await asyncio.create_subprocess_exec(
                *python("broker.cli", "models", "pull", model),
                stdin=DEVNULL,
                preexec_fn=dies_with_parent(new_group=True),
            )
            try:
                if await pull.wait() == 0:
                    break
            finally:
                end_group(pull.pid)
            self._say(f"model {model} could not be pulled; trying again in {PULL_RETRY_S:g} s")
            await asyncio.sleep(PULL_RETRY_S)
        self._missing.discard(model)
        for worker in self._waiting.pop(model):
            worker.child.start()


class Worker:
    """A guardian process and what it keeps.

    Args:
        child: The process.
        drain_s: How long it may take to finish what it holds.
    """

    def __init__(self, child: Child, drain_s: float) -> None:
        self.child = child
        self._drain_s = drain_s
        self._leaving: asyncio.Task[None] | None = None

    @property
    def guardian(self) -> Guardian | None:
        """See :class:`broker.placement.roster.Kept`."""
        return (socket.gethostname(), self.child.pid) if self.child.pid else None

    @property
    def gone(self) -> bool:
        """See :class:`broker.placement.roster.Kept`."""
        return self._leaving is not None and self._leaving.done()

    async def leave(self, patience_s: float) -> None:
        """All ends: it finishes what it holds within so long, or is killed."""
        if self._leaving is None:
            await self.child.stop(patience_s)
        elif not self._leaving.done():  # another SIGTERM would end it at once
            await asyncio.wait((self._leaving,), timeout=patience_s)
            self.child.kill()
            await self._leaving

    def drain(self) -> None:
        """See :class:`broker.placement.roster.Kept`."""
        self._leaving = asyncio.ensure_future(self.child.stop(self._drain_s + LONGER_S))
