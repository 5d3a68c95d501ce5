"""Workers on hosts of their own: each has a shared-memory folder and a state folder, as in a container."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from adapters.sweep import segments
from broker.client import Client
from broker.protocol import VERSION, Beat, Bye, Died, Hello, Message, Welcome, Who
from scripts.leftovers import files_in
from tests.wire import rig
from workers.hosting import Hosting


class Far:
    """A host: whatever is made while it is entered is on it."""

    def __init__(self, folder: Path) -> None:
        self.shm, self.state = folder / "shm", folder / "state"
        for sub in (self.shm, self.state):
            sub.mkdir(parents=True, mode=0o700)

    @contextmanager
    def entered(self) -> Iterator[None]:
        before = {name: os.environ[name] for name in ("OMNI_SHM_DIR", "OMNI_STATE_DIR")}
        os.environ |= {"OMNI_SHM_DIR": str(self.shm), "OMNI_STATE_DIR": str(self.state)}
        try:
            yield
        finally:
            os.environ |= before

    @property
    def segments(self) -> list[str]:
        return [item.name for item in segments(self.shm)]

    @property
    def leftovers(self) -> list[str]:
        """What the dead have left."""
        return [item.name for item in segments(self.shm) if not item.owner_alive] + self.files

    @property
    def files(self) -> list[str]:
        return [file for file in files_in(self.state) if not file.endswith("/name")]

    def lose(self) -> None:
        """Its memory is gone, as after a restart."""
        for file in self.shm.iterdir():
            file.unlink()


class Worker(rig.Worker):
    """One on another host. Its guardian may outlive the engine, and the engine its guardian's server."""

    def __init__(self, host: Far, address: str, stage: str, engine: Any) -> None:
        super().__init__(address, stage, engine)
        self.host = host
        with host.entered():
            self.hosting = Hosting(self._endpoint, "127.0.0.1", self._post)

    def _post(self, message: Message) -> None:
        self._guardian.post(message)

    async def start(self) -> None:
        with self.host.entered():  # no await in it but for the broker's answer, and nobody else begins then
            await super().start()

    def _hello(self) -> None:
        self._guardian.post(Hello(VERSION, "", self._stage, "far", os.getpid(), "cpu", *self.hosting.place()))

    def _on_message(self, message: Any) -> None:
        if type(message) is Welcome:
            with self.host.entered():
                self.hosting.begin(message, lambda store: store)
            if self.hosting.untold:
                self._hello()
            if not self._welcome.done():
                self._welcome.set_result(message)
        elif type(message) is Who:
            self._hello()
        elif type(message) in self.hosting.handlers:
            self.hosting.handlers[type(message)](message)

    def store(self, welcome: Welcome) -> str:
        return self.hosting.store

    def die(self) -> None:
        """The engine's process is gone."""
        self.process.connection.close()
        self.process.abroad.close()
        for running in self.process.running.values():
            assert running.task is not None
            running.task.cancel()
        self.process.arena.leave()
        self._beating.cancel()
        self._beating = asyncio.ensure_future(self._beat_alone())

    def report_death(self) -> None:
        """It dies, and its guardian says so."""
        self.die()
        self._guardian.post(Died(self.peer, "signal SIGKILL"))

    async def close_guardian(self) -> None:
        """What is left of it ends."""
        self._beating.cancel()
        self._guardian.post(Bye())
        self._guardian.close()
        self.hosting.close(sweeps=False)

    async def _beat_alone(self) -> None:
        while True:
            self._guardian.post(Beat([]))
            await asyncio.sleep(0.5)

    async def vanish(self) -> None:
        """Nobody on the host is left, as when it is cut off."""
        self.die()
        self._beating.cancel()
        self._guardian.close(0)
        self.hosting.close(sweeps=False)

    async def close(self) -> None:
        """It leaves as a real one does: the guardian stays until what the engine has left is read."""
        self.report_death()
        await self.hosting.linger(60, lambda: True, asyncio.Event())
        await self.close_guardian()


class Rig(rig.Rig):
    """A broker and a gateway on one host, workers on others."""

    def __init__(self, folder: Path, pipeline: Any) -> None:
        super().__init__(folder, pipeline)
        self._folder = folder
        self.hosts: dict[str, Far] = {}

    async def begin(self) -> None:
        self.broker.start()
        self.client = Client(self.broker.address, data_host="127.0.0.1")
        await self.client.connect(60)

    async def add(self, host: str, stage: str, engine: Any) -> Worker:
        """A worker on a host, which is made if it isn't there."""
        if host not in self.hosts:
            self.hosts[host] = Far(self._folder / host)
        worker = Worker(self.hosts[host], self.broker.address, stage, engine)
        self.workers[f"{host}/{stage}"] = worker
        await worker.start()
        return worker

    def forget(self, worker: Worker) -> None:
        """It is not to be closed in the end."""
        self.workers = {name: other for name, other in self.workers.items() if other is not worker}

    async def close(self) -> None:
        await super().close()
        for host in self.hosts.values():
            assert not host.segments + host.files, (host.shm, host.segments, host.files)
            shutil.rmtree(host.shm)
            shutil.rmtree(host.state)


@asynccontextmanager
async def far_rig(folder: Path, pipeline: Any) -> AsyncIterator[Rig]:
    """Nothing is left on any host in the end."""
    made = Rig(folder, pipeline)
    await made.begin()
    try:
        yield made
    finally:
        await made.close()
