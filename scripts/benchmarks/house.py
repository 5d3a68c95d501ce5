"""`omni-broker start` with folders of its own: starting it, looking at every process of it, finding leaks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from adapters.segment import shm_dir
from adapters.sweep import segments
from broker.client import BrokerError, Client
from scripts.leftovers import files_in
from scripts.ports import free_port

PREFIX = "omni-bench-"
START_S = 300.0  #: the models of `voice` take up to a minute on two cores
STOP_S = 90.0
GONE_S = 20.0
ASK_S = 3.0
LOG_TAIL = 4000

#: The module that a process runs -> what it is.
ROLES = {
    "broker.cli": "supervisor",
    "broker.server": "broker",
    "broker.gateway": "gateway",
    "workers.cli": "guardian",
    "workers.worker": "engine",
    "workers.engines.diffusion.rank": "rank",
}


class Running(NamedTuple):
    """One process of a house. ``stage``: "pipeline/stage" of a guardian and of its engine, else ""."""

    pid: int
    parent: int
    role: str
    stage: str
    began: float  #: seconds since the machine's start


class Leaks(NamedTuple):
    """What is left after the end."""

    processes: int
    segments: int
    files: int  #: sockets, journals and stored chunks


class House:
    """What one `omni-broker start` runs, and where.

    Args:
        folder: Short, since sockets' paths are; on a disk, where there is one.
        shared: For shared memory.
        options: Of `omni-broker start`, without the port.
    """

    def __init__(self, folder: Path, shared: Path, options: Sequence[str]) -> None:
        self.folder, self.shm_dir = folder, shared
        self.run_dir, self.state_dir = folder / "run", folder / "state"
        for sub in (self.run_dir, self.state_dir):
            sub.mkdir(mode=0o700)
        self.address = f"ipc://{self.run_dir}"
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._command = (
            "-P",
            "-m",
            "broker.cli",
            "start",
            "--port",
            str(port),
            "--stop-with-stdin",
            *options,
        )
        self._env = {
            **os.environ,
            "OMNI_RUN_DIR": str(self.run_dir),
            "OMNI_STATE_DIR": str(self.state_dir),
            "OMNI_SHM_DIR": str(self.shm_dir),
        }
        self._log = folder / "log"
        self._process: Process | None = None
        self.health_s = self.ready_s = 0.0  #: from the start until /health and /ready said yes

    # --- starting and ending

    async def start(self) -> None:
        """Returns when every stage has a worker. Raises RuntimeError with the log's end otherwise."""
        began = time.monotonic()
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *self._command, env=self._env, stdin=PIPE, stdout=log, stderr=log
            )
        await self._says_yes("/health", START_S)
        self.health_s = time.monotonic() - began
        if not await self.ready(START_S):
            raise RuntimeError(f"the server did not get ready:\n{self.log[-LOG_TAIL:]}")
        self.ready_s = time.monotonic() - began

    async def ready(self, timeout_s: float) -> bool:
        """Waits until every stage has a worker; False when that takes longer, or the start has ended."""
        return await self._says_yes("/ready", timeout_s)

    async def _says_yes(self, path: str, timeout_s: float) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as session:
            while self._process.returncode is None and time.monotonic() < deadline:
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{self.url}{path}") as answer:
                        if answer.status == 200:
                            return True
                await asyncio.sleep(0.02)
        return False

    async def kill_everything(self) -> None:
        """SIGKILL to every process, the supervisor first; returns when all are gone."""
        for process in sorted(self.processes(), key=lambda p: p.role != "supervisor"):
            send(process.pid, signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()
        await self._gone()

    async def stop(self) -> Leaks:
        """Ends it as a user does, and says what is left. Nothing of it runs afterwards."""
        for process in self.processes():
            send(process.pid, signal.SIGCONT)
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_S)
        left = await self._gone()
        for process in left:
            send(process.pid, signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()
        files = len(files_in(self.run_dir)) + len(files_in(self.state_dir))
        return Leaks(len(left), len(files_in(self.shm_dir)), files)

    async def _gone(self) -> list[Running]:
        """Waits until no process is left; those that still are after a while."""
        deadline = time.monotonic() + GONE_S
        while True:
            left = self.processes()
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.02)

    # --- looking at it

    @property
    def log(self) -> str:
        """What all of it has said so far."""
        return self._log.read_text(errors="replace")

    def processes(self) -> list[Running]:
        """All living processes that were started in this house."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                if os.fsencode(self.folder) in (process / "environ").read_bytes():
                    found.append(_running(process))
        stages = {process.pid: process.stage for process in found}
        return [
            process._replace(stage=stages.get(process.parent, "")) if process.role == "engine" else process
            for process in found
        ]

    async def status(self) -> dict[str, Any] | None:
        """The broker's report, or None while it does not answer."""
        try:
            async with asyncio.timeout(ASK_S), Client(self.address, kind="cli") as client:
                return await client.inspect("status")
        except (BrokerError, TimeoutError):
            return None

    async def tables(self, timeout_s: float) -> dict[str, int]:
        """The broker's tables as soon as they are empty, or what is in them after so long."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = await self.status()
            held = {name: n for name, n in status["tables"].items() if n} if status else {"no_answer": 1}
            if not held or time.monotonic() > deadline:
                return held
            await asyncio.sleep(0.1)

    async def orphans(self, timeout_s: float) -> int:
        """Segments whose owner is dead, as soon as there are none, or after so long.

        The broker learns of some deaths only by silence, and frees what the dead owned when nobody reads it.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found = sum(not segment.owner_alive for segment in segments(self.shm_dir))
            if not found or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.1)


@asynccontextmanager
async def house(options: Sequence[str]) -> AsyncIterator[House]:
    """A house that is ready; nothing of it runs afterwards, and its folder is removed."""
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryDirectory(prefix=PREFIX, dir=shm_dir(), ignore_cleanup_errors=True) as shared,
    ):
        home = House(Path(folder), Path(shared), options)
        try:
            await home.start()
            yield home
        finally:
            await home.stop()


def send(pid: int, number: signal.Signals) -> bool:
    """A signal to a process; False when it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def memory_mib(pids: Sequence[int]) -> float:
    """Resident memory of processes together, less what they share; MiB."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
            total += int(resident) - int(shared)
    return total * os.sysconf("SC_PAGE_SIZE") / 2**20


def _running(process: Path) -> Running:
    words = (process / "cmdline").read_text().split("\0")
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    role = ROLES.get(module, "other")
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    stage = f"{_option(words, '--pipeline')}/{_option(words, '--stage')}" if role == "guardian" else ""
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return Running(int(process.name), int(fields[1]), role, stage, began)


def _option(words: Sequence[str], name: str) -> str:
    return words[words.index(name) + 1] if name in words else ""


def told(pipelines: Sequence[str], stages: Sequence[str] = ()) -> list[str]:
    """Options of `omni-broker start` for these pipelines and settings of stages, quiet."""
    named = [word for name in pipelines for word in ("--pipeline", name)]
    return [*named, *(word for text in stages for word in ("--stage", text)), "--log-level", "WARNING"]


def message_of(body: str) -> str:
    """What an error's body says, in one line."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body[:200]
