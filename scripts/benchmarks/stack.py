"""A broker and its workers as real processes of their own, for benchmarks that need no gateway."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from broker.client import Client
from pipelines.graph import Pipeline

START_S = 60.0
STOP_S = 10.0


class Stack(NamedTuple):
    """What runs: the broker's process, and a client of it in this one."""

    client: Client
    broker: subprocess.Popen[bytes]
    address: str


@asynccontextmanager
async def running(pipeline: Pipeline, *, keeps: bool = True) -> AsyncIterator[Stack]:
    """Starts a broker and each stage's replicas, waits until all are ready, and stops all at the end.

    Without ``keeps`` the broker has no journal, and edges keep no chunk that was delivered.

    Raises RuntimeError when a process ends before that, or not everything is ready within a minute.
    """
    with (
        tempfile.TemporaryDirectory(prefix="omni-bench-") as folder,
        _processes(pipeline if keeps else pipeline.with_checkpoint("none"), Path(folder), keeps) as started,
    ):
        address = f"ipc://{folder}"
        client = Client(address, kind="cli")
        await client.connect(START_S)
        try:
            await _wait_until_ready(client, started)
            yield Stack(client, started[0], address)
        finally:
            await client.close()


@contextmanager
def _processes(pipeline: Pipeline, folder: Path, journal: bool) -> Iterator[list[subprocess.Popen[bytes]]]:
    document = folder / "pipelines.json"
    document.write_bytes(msgspec.json.encode([pipeline]))
    address = f"ipc://{folder}"
    broker = ["broker.server", "--pipelines", str(document), "--address", address, "--log-level", "WARNING"]
    if journal:
        (folder / "state").mkdir()
        broker += ["--state", str(folder / "state")]
    with ExitStack() as stack:
        started: list[subprocess.Popen[bytes]] = []

        def start(command: list[str]) -> None:
            started.append(subprocess.Popen([sys.executable, "-P", "-m", *command]))
            stack.callback(_stop, started[-1])

        start(broker)
        for name, stage in pipeline.stages.items():
            for _ in range(stage.resources.least):
                start(["workers.cli", "--pipeline", pipeline.name, "--stage", name, "--broker", address])
        yield started


async def _wait_until_ready(client: Client, started: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_S
    while not (await client.inspect("ready"))["ready"]:
        for process in started:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args!r} ended with exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the stages were not ready within {START_S:g} s")
        await asyncio.sleep(0.05)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
