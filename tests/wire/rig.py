"""A broker process that may be killed and started again, and workers whose engines live in the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from adapters.chunk import Payload
from broker.address import endpoints
from broker.client import Client, RequestStream
from broker.protocol import VERSION, Beat, Bye, Hello, Welcome, Who, decode_to_worker, new_peer
from broker.wire import Connection
from pipelines.graph import Pipeline
from workers.config import EngineConfig
from workers.engine import Job
from workers.worker import WorkerProcess


async def eventually(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Lets everything run until the condition is true; fails with ``what`` after the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        await asyncio.sleep(0.002)


class Broker:
    """A broker process with a state folder."""

    def __init__(self, folder: Path, pipeline: Pipeline) -> None:
        self.address = f"ipc://{folder}/run"
        self.pipeline = pipeline
        self._folder = folder
        self._state = folder / "state"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; whoever connects waits until it is there."""
        self._state.mkdir(mode=0o700, exist_ok=True)
        document = self._folder / "pipelines.json"
        document.write_bytes(msgspec.json.encode([self.pipeline]))
        command = [
            "broker.server",
            "--pipelines",
            document,
            "--address",
            self.address,
            "--state",
            self._state,
        ]
        self._process = subprocess.Popen([sys.executable, "-P", "-m", *map(str, command)], env=os.environ)

    @property
    def running(self) -> bool:
        """Whether it was started and not ended since."""
        return self._process is not None

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def lose_state(self) -> None:
        """The next one knows nothing."""
        shutil.rmtree(self._state)

    def stop(self) -> None:
        """A clean end, if it still runs."""
        if self._process is not None:
            self._process.terminate()
            assert self._process.wait(60) == 0


class Counter:
    """An engine in the test's hands: payloads {"n": 0}, {"n": 1}, ... as far as it is allowed.

    Args:
        total: Payloads of each job.
        floats: Length of a tensor that goes with each; 0: none.
        allowed: Payloads that may be yielded; more are, when it is raised with :meth:`allow`.
        reads: Whether the job first gathers its input.
    """

    resumes = False

    def __init__(
        self, total: int, *, floats: int = 0, allowed: int | None = None, reads: bool = True
    ) -> None:
        self.total, self.floats, self.reads = total, floats, reads
        self.yielded = 0
        self.jobs: list[Job] = []
        self.ended = 0
        self._allowed = total if allowed is None else allowed
        self._more = asyncio.Event()

    def allow(self, payloads: int) -> None:
        """So many may be yielded from now on."""
        self._allowed = payloads
        self._more.set()

    async def start(self) -> None:
        """There is nothing to load."""

    async def stop(self) -> None:
        """Nor to let go."""

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """Counts."""
        self.jobs.append(job)
        try:
            if self.reads:
                for producer in job.inputs:
                    await job.gather(producer)
            for n in range(self.total):
                while n >= self._allowed:
                    self._more.clear()
                    await self._more.wait()
                self.yielded = n + 1
                yield payload(n, self.floats)
        finally:
            self.ended += 1


class Reader(Counter):
    """Hands on the "n" of what it reads, as far as it is allowed."""

    def __init__(self, *, allowed: int) -> None:
        super().__init__(1 << 30, allowed=allowed)

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """Reads one payload, yields one."""
        self.jobs.append(job)
        (stream,) = job.inputs.values()
        n = 0
        while True:
            while n >= self._allowed:
                self._more.clear()
                await self._more.wait()
            item = await anext(stream, None)
            if item is None:
                return
            n += 1
            self.yielded = n
            yield {"n": item["n"]}


def payload(n: int, floats: int) -> Payload:
    """What :class:`Counter` yields."""
    return {"n": n, "data": np.full(floats, n, np.float32)} if floats else {"n": n}


class Worker:
    """A guardian by hand, and a real worker process's inside with an engine of the test."""

    def __init__(self, address: str, stage: str, engine: Any) -> None:
        self.engine = engine
        self._stage = stage
        self._endpoint = endpoints(address).workers
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self.peer = new_peer("w")
        self.process: WorkerProcess

    async def start(self) -> None:
        """Reports for work."""
        self._guardian = Connection(self._endpoint, new_peer("g"), decode_to_worker, self._on_message)
        self._hello()
        welcome = await asyncio.wait_for(self._welcome, 60)
        config = EngineConfig(
            self._endpoint,
            self.peer,
            self._guardian.peer,
            welcome.run,
            welcome.pipeline,
            self._stage,
            boot=welcome.boot,
            store=self.store(welcome),
        )
        self.process = WorkerProcess(config, self.engine)
        self.process.ready()
        self._beating = asyncio.ensure_future(self._beat())

    def store(self, welcome: Welcome) -> str:
        """What its engine writes to."""
        return welcome.store

    def _hello(self) -> None:
        self._guardian.post(Hello(VERSION, "", self._stage, socket.gethostname(), os.getpid()))

    def _on_message(self, message: Any) -> None:
        if type(message) is Welcome and not self._welcome.done():
            self._welcome.set_result(message)
        elif type(message) is Who:
            self._hello()

    async def _beat(self) -> None:
        while True:
            self._guardian.post(Beat([self.peer]))
            await asyncio.sleep(0.5)

    async def close(self) -> None:
        """Leaves."""
        self._beating.cancel()
        self.process.connection.close()
        self._guardian.post(Bye())
        self._guardian.close()
        self.process.arena.leave()


class Rig:
    """All of it."""

    def __init__(self, folder: Path, pipeline: Pipeline) -> None:
        self.broker = Broker(folder, pipeline)
        self.workers: dict[str, Worker] = {}
        self.client: Client

    async def start(self, engines: dict[str, Any], **client: Any) -> None:
        """``engines``: stage -> the engine of its one worker."""
        self.broker.start()
        self.client = Client(self.broker.address, **client)
        await self.client.connect(60)
        for stage, engine in engines.items():
            worker = self.workers[stage] = Worker(self.broker.address, stage, engine)
            await worker.start()

    async def restart(self) -> None:
        """Kills the broker and starts another, which everybody gets to know."""
        self.broker.kill()
        self.broker.start()

    async def submit(self, **more: Any) -> RequestStream:
        """A small request for the one output."""
        return await self.client.submit("line", outputs=["out"], given={"request": [{}]}, **more)

    async def close(self) -> None:
        """Ends all."""
        await self.client.close()
        for worker in self.workers.values():
            await worker.close()
        if self.broker.running:
            await self._until_it_is_empty()
        self.broker.stop()

    async def _until_it_is_empty(self) -> None:
        """A broker that is told to stop before it has read our farewells keeps what it believes we need."""
        async with Client(self.broker.address) as last:
            while True:
                status = await last.inspect("status")
                workers = sum(
                    len(stage["workers"]) for stage in status["pipelines"]["line"]["stages"].values()
                )
                if not workers and len(status["clients"]) == 1:
                    return


@contextlib.asynccontextmanager
async def rig(folder: Path, pipeline: Pipeline, engines: dict[str, Any], **client: Any) -> AsyncIterator[Rig]:
    """A broker, a client, and a worker for each stage."""
    made = Rig(folder, pipeline)
    await made.start(engines, **client)
    try:
        yield made
    finally:
        await made.close()
