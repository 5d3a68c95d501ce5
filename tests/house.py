"""`omni-broker start` and all its processes, as a user has them."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from adapters.sweep import sweep
from broker.client import Client
from broker.protocol import (
    Inspect,
    Letters,
)
from scripts.benchmarks.asked import asked
from scripts.leftovers import files_in, kill_all, processes_of
from scripts.ports import free_port
from tests.leftovers import process_of, until

START_S = 120.0  #: idle machines need a few seconds, busy ones many
STOP_S = 60.0
GONE_S = 20.0
ASK_S = 60.0  #: a broker that is being restarted answers within so long,
ANSWER_MS = 5000  #: if it is asked again: what was asked of the one before it is lost


class PatientClient(Client):
    """A client for which a broker may stand still for longer than people would wait."""

    async def connect(self, timeout_s: float = START_S) -> None:
        """See the class."""
        await super().connect(timeout_s)


class House:
    """A run folder, and what is started in it.

    Args:
        folder: Short, since sockets' paths are.
        env: More variables for all that is started.
    """

    def __init__(self, folder: Path, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.run_dir, self.shm_dir, self.state_dir = folder / "run", folder / "shm", folder / "state"
        for sub in (self.run_dir, self.shm_dir, self.state_dir):
            sub.mkdir(mode=0o700, exist_ok=True)
        self.address = f"ipc://{self.run_dir}"
        own = {
            "OMNI_RUN_DIR": str(self.run_dir),
            "OMNI_SHM_DIR": str(self.shm_dir),
            "OMNI_STATE_DIR": str(self.state_dir),
        }
        self.env = {**os.environ, **own, **(env or {})}
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.began = 0.0
        self._log = folder / "log"
        self._log.touch()
        self._workers: list[subprocess.Popen[bytes]] = []

    # --- starting and ending

    def start(self, *options: str, ready: bool = True) -> None:
        """`omni-broker start`; with ``ready`` it waits until every stage has a worker."""
        command = module("broker.cli", "start", "--port", str(self.port), *options)
        self.began = time.monotonic()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.env)
        if ready:
            self.until(self.is_ready, START_S)

    def worker(self, stage: str, *options: str) -> subprocess.Popen[bytes]:
        """`omni-worker` for a stage; it is ended with the house. The broker may still be on its way."""
        command = module("workers.cli", "--stage", stage, "--patience", str(START_S), *options)
        with self._log.open("ab") as log:
            self._workers.append(subprocess.Popen(command, stdout=log, stderr=log, env=self.env))
        return self._workers[-1]

    def kill(self) -> None:
        """SIGKILL to the process that was started."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def loses_power(self) -> None:
        """Every process is killed at once, and shared memory is gone; what is on disk stays."""
        kill_all(self.folder)
        if self.process is not None:
            self.kill()
        for folder in (self.shm_dir, self.run_dir):
            for file in files_in(folder):
                (folder / file).unlink()

    def stop(self) -> None:
        """Ends what still runs, and checks that no process, socket, memory or state is left.

        Dead letters go first; what else a clean stop keeps is a test's own affair (:meth:`forget`).
        """
        try:
            if self.process is not None and self.process.poll() is None:
                self._ask(Letters(1, "drop", "all"))
            for process in (*self._workers, *([self.process] if self.process is not None else ())):
                if process.poll() is None:
                    process.terminate()
                process.wait(STOP_S)
            if self.process is not None:
                assert self.process.returncode == 0, self.log
            until(lambda: not self.processes(), "all processes to end", GONE_S)
            for folder in (self.run_dir, self.shm_dir, self.state_dir):
                left = files_in(folder)
                assert left == [], f"{folder} holds {left}; the log:\n{self.log}"
        finally:
            kill_all(self.folder)

    # --- looking at it

    @property
    def log(self) -> str:
        """What all of it has said so far."""
        return self._log.read_text(errors="replace")

    def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> float:
        """Waits for a condition; returns the seconds it took, and fails with the log after the time."""
        began = time.monotonic()
        try:
            until(condition, "a condition", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; the log:\n{self.log[-4000:]}") from None
        return time.monotonic() - began

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`omni-broker` with these arguments, to its end."""
        return subprocess.run(
            module("broker.cli", *arguments),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def get(self, path: str) -> tuple[int, bytes]:
        """A GET request's status and body; (0, b"") while nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def is_ready(self) -> bool:
        """Whether every stage has a worker. Fails when `omni-broker start` has ended instead."""
        assert self.process is None or self.process.poll() is None, f"it has ended; the log:\n{self.log}"
        return self.get("/ready")[0] == 200

    def client(self) -> Client:
        """A client to enter."""
        return PatientClient(self.address)

    def forget(self) -> None:
        """Removes what a clean stop has kept for the next start. What is still ending holds its memory."""
        self.until(lambda: not self.processes(), GONE_S)
        for file in files_in(self.state_dir):
            (self.state_dir / file).unlink()

        def swept() -> bool:
            sweep(self.shm_dir)
            return not files_in(self.shm_dir)

        self.until(swept, GONE_S)

    def status(self) -> dict[str, Any]:
        """The broker's report. It blocks, so it works with and without a running event loop."""
        report = self._ask(Inspect(1, "status"))
        if report is None:
            raise AssertionError(f"the broker does not answer; the log:\n{self.log[-4000:]}")
        return report

    def _ask(self, question: Inspect | Letters) -> dict[str, Any] | None:
        """The broker's answer; None if there is none."""
        deadline = time.monotonic() + ASK_S
        while (report := asked(self.address, question, ANSWER_MS)) is None and time.monotonic() < deadline:
            pass
        return report

    def stage(self, pipeline: str, stage: str) -> dict[str, Any]:
        """A stage's part of the report."""
        part: dict[str, Any] = self.status()["pipelines"][pipeline]["stages"][stage]
        return part

    def pids(self, pipeline: str, stage: str) -> set[int]:
        """The engine processes that work for a stage."""
        return {worker["pid"] for worker in self.stage(pipeline, stage)["workers"]}

    def processes(self) -> dict[int, str]:
        """All living processes that were started in this house: id -> command line."""
        return processes_of(self.folder)

    def process_of(self, name: str) -> int:
        """The one process that runs a module of ours, once there is one: it may be being started again."""
        return process_of(self.folder, name)


@contextmanager
def empty_house(env: dict[str, str] | None = None) -> Iterator[House]:
    """A house in folders of its own, in which nothing runs yet; it is stopped in the end."""
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/dev/shm") as folder:
        home = House(Path(folder), env)
        try:
            yield home
        finally:
            home.stop()


def module(name: str, *arguments: str) -> list[str]:
    """A command line that runs a module of ours."""
    return [sys.executable, "-P", "-m", name, *arguments]


def line(*names: str) -> dict[str, Any]:
    """The document of a pipeline `line` whose stages hand on what they get, in a row."""
    return {
        "name": "line",
        "outputs": {"text": names[-1]},
        "stages": {name: {"engine": "function", "options": {"op": "pass"}} for name in names},
        "edges": [{"from": a, "to": b} for a, b in zip(("request", *names), names, strict=False)],
        "endpoints": {"chat": {"input": "request", "outputs": ["text"]}},
    }


def write(folder: Path, document: dict[str, Any]) -> str:
    """Writes a pipeline's file; returns its path."""
    file = folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return str(file)
