"""A Ray cluster on this machine: a head that holds no worker, and nodes that can be lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.leftovers import kill_all, processes_of
from scripts.ports import free_port
from tests.house import House
from tests.leftovers import until

START_S = 120.0
STOP_S = 10.0
#: Ray's settings: a lost node is noticed within seconds, not within fifteen; nobody is told of this cluster
QUICK = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_MEMORY_MONITOR": "1",
}
MEMORY = ("--object-store-memory", "80000000")  #: nothing goes through it
PORTS = ("--min-worker-port", "0", "--max-worker-port", "0")  #: drawn; Ray's own range has the head's in it


class Cluster:
    """The processes of Ray. Each node's, with all that they start, have its folder in their environment.

    Args:
        home: The house whose folders workers on the nodes use.
    """

    def __init__(self, home: House) -> None:
        self._home = home
        self.address = f"127.0.0.1:{free_port()}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def _ray(self, name: str, *options: str) -> None:
        """`ray start`, and again where it gives up: a node has 30 s, which is little on a busy machine."""
        environment = {**self._home.env, **QUICK, "OMNI_TEST_NODE": str(self.folder(name))}
        command = [
            sys.executable,
            "-P",
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            *MEMORY,
            *PORTS,
            *options,
        ]
        process: subprocess.Popen[bytes] | None = None

        def up() -> bool:
            nonlocal process
            if process is None or process.poll() is not None:
                self.lose(name)
                with (self._home.folder / f"{name}.log").open("ab") as log:
                    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                self._processes.append(process)
            return "Ray runtime started" in self.log(name)

        try:
            until(up, f"the node {name} to start", START_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; its log:\n{self.log(name)[-2000:]}") from None

    def start(self) -> None:
        """The head, of which as little as can be."""
        port = self.address.rpartition(":")[2]
        where = ("--port", port, "--temp-dir", str(self._home.folder / "ray"))
        less = ("--include-dashboard", "false", "--include-log-monitor", "false", "--no-monitor")
        self._ray("head", "--head", *where, "--num-cpus", "0", *less)

    def add(self, name: str, cpus: int) -> None:
        """One more node; it is up when this ends. Two that start at once get into each other's way."""
        where = ("--address", self.address, "--include-log-monitor", "false")
        self._ray(name, *where, "--num-cpus", str(cpus))

    def lose(self, name: str) -> None:
        """SIGKILL to all that runs on a node."""
        kill_all(self.folder(name))

    def node_of(self, pid: int) -> str:
        """The node that a process is on."""
        (name,) = (one for one in ("one", "two") if pid in processes_of(self.folder(one)))
        return name

    def folder(self, name: str) -> Path:
        """Stands for a node; it need not exist."""
        return self._home.folder / "nodes" / name

    def log(self, name: str) -> str:
        """What `ray start` has said."""
        return (self._home.folder / f"{name}.log").read_text()

    def stop(self) -> None:
        """Ends all of it."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        kill_all(self._home.folder / "nodes")


@contextmanager
def cluster(home: House) -> Iterator[Cluster]:
    """A running head."""
    made = Cluster(home)
    try:
        made.start()
        yield made
    finally:
        made.stop()
