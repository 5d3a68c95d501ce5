"""A broker on one host and its workers on others: each has a link, folders and shared memory of its own.

The hosts are network namespaces (:mod:`scripts.benchmarks.lan`). What a process knows of its host it has from
its environment and from its network, so nothing but the kernel is shared, as by containers on one machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from adapters.process import dies_with_parent, python
from adapters.segment import shm_dir
from broker.keys import make
from broker.protocol import (
    Inspect,
    Letters,
)
from scripts.benchmarks.asked import asked
from scripts.benchmarks.house import GONE_S, PREFIX, START_S, STOP_S, Leaks
from scripts.benchmarks.lan import Lan, Traffic
from scripts.leftovers import files_in

BROKER_PORT, GATEWAY_PORT = 5555, 8000
ANSWER_MS = 3000
TRIES = 10
KEPT = ("OMNI_CACHE",)  #: models, which hosts without a network of their own could not pull
LOOK_S = 0.02


class Host:
    """One host.

    Args:
        lan: Its network.
        number: Its number there.
        folder: Of its own; short, since sockets' paths are, and in memory.
        env: For all that is started on it.
    """

    def __init__(self, lan: Lan, number: int, folder: Path, env: Mapping[str, str]) -> None:
        self.address = lan.addresses[number]
        self.run_dir, self.shm_dir, self.state_dir = folder / "run", folder / "shm", folder / "state"
        for sub in (self.run_dir, self.shm_dir, self.state_dir):
            sub.mkdir(mode=0o700, parents=True)
        own = {
            "OMNI_RUN_DIR": str(self.run_dir),
            "OMNI_SHM_DIR": str(self.shm_dir),
            "OMNI_STATE_DIR": str(self.state_dir),
            "OMP_NUM_THREADS": "1",
        }
        others = {name: value for name, value in os.environ.items() if name in KEPT or name[:5] != "OMNI_"}
        self.env = {**others, **own, **env}
        self._lan = lan
        self._number = number
        self._log = folder / "log"
        self._log.touch()
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def log(self) -> str:
        """What all that ran on it has said so far."""
        return self._log.read_text(errors="replace")

    def popen(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts a module of ours here. Only the main thread may: it dies with the one that starts it."""
        command = self._lan.inside(self._number, python(module, *arguments))
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=dies_with_parent(),  # noqa: PLW1509 - of one thread, as it asks for
            )
        self._started.append(process)
        return process

    def run(
        self, module: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a module of ours on this host to its end; ``env``: more variables."""
        command = self._lan.inside(self._number, python(module, *arguments))
        return subprocess.run(
            command,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def processes(self) -> dict[int, str]:
        """All living processes of this host: id -> command line."""
        mark = os.fsencode(f"OMNI_RUN_DIR={self.run_dir}\0")
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                if mark in (process / "environ").read_bytes():
                    found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ").strip()
        return found

    def kill_all(self) -> None:
        """SIGKILL to every process of it; returns when all are gone. Its memory and files stay."""
        while pids := self.processes():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
        self._reap()

    def started(self, *but: subprocess.Popen[bytes]) -> list[subprocess.Popen[bytes]]:
        """What was started here and is alive, but for these."""
        return [process for process in self._started if process.poll() is None and process not in but]

    def terminate(self, *but: subprocess.Popen[bytes]) -> None:
        """SIGTERM to all that was started here, but for these."""
        for process in self.started(*but):
            process.terminate()

    def wait(self, timeout_s: float) -> bool:
        """Waits until no process of this host is left. False when that takes longer."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._reap()
            if not self.processes():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)

    def _reap(self) -> None:
        self._started = [process for process in self._started if process.poll() is None]

    def cut(self) -> None:
        """Its link is dead from now on, without a sign of that to anybody."""
        self._lan.cut(self._number)

    def restore(self) -> None:
        """Its link works again."""
        self._lan.restore(self._number)

    def traffic(self) -> Traffic:
        """What its link has carried so far."""
        return self._lan.traffic(self._number)

    def segments(self) -> list[str]:
        """Names of what lies in its shared memory."""
        return sorted(path.name for path in self.shm_dir.iterdir())

    def files(self) -> list[str]:
        """Everything in its folders but folders."""
        return [*files_in(self.run_dir), *files_in(self.state_dir)]


class Worker(NamedTuple):
    """One living worker, as the broker knows it."""

    host: int  #: number of the host its process runs on
    pid: int
    running: int  #: tasks that it holds


class Cluster:
    """The first host has the broker and the gateway; workers are where they are put.

    Args:
        folder: For all its hosts.
        hosts: How many.
        env: For all processes.
    """

    def __init__(self, folder: Path, hosts: int, env: Mapping[str, str] | None = None) -> None:
        self.keys = folder / "keys"
        make(self.keys)
        workers_keys = folder / "workers-keys"  # which lack the broker's secret
        shutil.copytree(self.keys, workers_keys, ignore=shutil.ignore_patterns("server.key_secret"))
        self.lan = Lan(hosts)
        self.hosts = [
            Host(
                self.lan,
                number,
                folder / f"h{number}",
                {"OMNI_KEYS": str(workers_keys if number else self.keys), **(env or {})},
            )
            for number in range(hosts)
        ]
        self.first, *self.others = self.hosts
        self.address = f"tcp://{self.first.address}:{BROKER_PORT}"
        self.url = f"http://{self.first.address}:{GATEWAY_PORT}"
        self.local = f"ipc://{self.first.run_dir}"  #: a file: it leads to the broker whatever links are cut
        self._options: tuple[str, ...] = ()
        self._broker: list[subprocess.Popen[bytes]] = []

    # --- starting and ending

    def start(self, *options: str) -> None:
        """`omni-broker start` without workers; the same options as last time if there are none."""
        self._options = options or self._options
        where = ("--listen", self.address, "--host", self.first.address, "--port", str(GATEWAY_PORT))
        self._broker.append(self.first.popen("broker.cli", "start", "--no-workers", *where, *self._options))

    def kill_broker(self) -> None:
        """SIGKILL to the broker's process alone; the supervisor starts another."""
        for pid, command in self.first.processes().items():
            if "broker.server" in command.split():
                os.kill(pid, signal.SIGKILL)

    def worker(self, host: int, stage: str) -> subprocess.Popen[bytes]:
        """`omni-worker` for "pipeline/stage" on one of the hosts."""
        pipeline, _, name = stage.partition("/")
        where = ("--broker", self.address, "--patience", "60")
        return self.hosts[host].popen("workers.cli", "--pipeline", pipeline, "--stage", name, *where)

    def place(self, workers: Mapping[int, Sequence[str]], timeout_s: float = START_S) -> None:
        """Host's number -> "pipeline/stage" of each worker there; waits until all are ready."""
        wanted = [(host, stage) for host, stages in workers.items() for stage in stages]
        for host, stage in wanted:
            self.worker(host, stage)
        stages = {stage for _, stage in wanted}
        self.until(lambda: sum(len(self.workers(stage)) for stage in stages) >= len(wanted), timeout_s)

    def stop(self) -> Leaks:
        """Ends it as a user does, workers first, and says what is left. Nothing of it runs afterwards.

        Dead letters are dropped before, since a clean stop keeps them.
        """
        self.lan.restore(*range(len(self.hosts)))
        for _ in range(TRIES if self.first.started() else 0):  # it may have been killed just now
            if self._ask(Letters(1, "drop", "all")) is not None:
                break
        left = 0
        for host in self.hosts:
            host.terminate(*self._broker)
        deadline = time.monotonic() + STOP_S
        for worker in [worker for host in self.hosts for worker in host.started(*self._broker)]:
            with suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.0, deadline - time.monotonic()))
        self.first.terminate()
        for host in self.hosts:
            if not host.wait(STOP_S if host is self.first else GONE_S):
                left += len(host.processes())
                host.kill_all()
        return Leaks(
            left,
            sum(len(host.segments()) for host in self.hosts),
            sum(len(host.files()) for host in self.hosts),
        )

    def close(self) -> None:
        """Nothing of it runs or lies about afterwards, however it stands."""
        try:
            for host in reversed(self.hosts):
                host.kill_all()
        finally:
            self.lan.close()

    # --- looking at it

    @property
    def log(self) -> str:
        """The end of what each host has said."""
        return "\n".join(f"--- host {n}\n{host.log[-3000:]}" for n, host in enumerate(self.hosts))

    def until(self, condition: Callable[[], object], timeout_s: float = 30.0) -> float:
        """Waits for a condition; gives the seconds it took. Raises TimeoutError with the ends of all logs."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > timeout_s:
                raise TimeoutError(f"waited {timeout_s:g} s for a condition; the logs:\n{self.log}")
            time.sleep(LOOK_S)
        return time.monotonic() - began

    def status(self) -> dict[str, Any] | None:
        """The broker's report, or None while it does not answer."""
        return self._ask(Inspect(1, "status"))

    def _ask(self, question: Inspect | Letters) -> dict[str, Any] | None:
        return asked(self.local, question, ANSWER_MS)

    def workers(self, stage: str) -> list[Worker]:
        """The living workers of "pipeline/stage"."""
        status = self.status()
        if status is None:
            return []
        pipeline, _, name = stage.partition("/")
        found = status["pipelines"][pipeline]["stages"][name]["workers"]
        hosts = {pid: number for number, host in enumerate(self.hosts) for pid in host.processes()}
        return [Worker(hosts[w["pid"]], w["pid"], w["running"]) for w in found if w["pid"] in hosts]

    def tables(self, timeout_s: float) -> dict[str, int]:
        """The broker's tables as soon as they are empty, or what is in them after so long."""
        return _settled(self._held, timeout_s)

    def _held(self) -> dict[str, int]:
        status = self.status()
        return {name: n for name, n in status["tables"].items() if n} if status else {"no_answer": 1}

    def memory(self, timeout_s: float) -> dict[str, int]:
        """Host's address -> segments there of dead owners, as soon as there are none, or after so long."""
        return _settled(self._orphans, timeout_s)

    def _orphans(self) -> dict[str, int]:
        from adapters.sweep import segments

        dead = {h.address: sum(not s.owner_alive for s in segments(h.shm_dir)) for h in self.hosts}
        return {address: number for address, number in dead.items() if number}


def _settled(look: Callable[[], dict[str, int]], timeout_s: float) -> dict[str, int]:
    """What is found as soon as that is nothing, or after so long."""
    deadline = time.monotonic() + timeout_s
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


@contextmanager
def cluster(hosts: int, env: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """A cluster in which nothing runs yet; nothing is left of it in the end, not even what its stop left."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=shm_dir(), ignore_cleanup_errors=True) as folder:
        made = Cluster(Path(folder), hosts, env)
        try:
            yield made
        finally:
            made.close()
