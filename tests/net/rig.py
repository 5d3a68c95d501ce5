"""A far host: its shared memory, its disk store, and its data servers, here or in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from adapters.arena import SharedMemory
from adapters.disk import DiskStore
from adapters.handle import Handle
from adapters.host import this_host
from adapters.net.fetch import Fetcher
from adapters.net.secure import Secure
from adapters.net.server import DataServer
from adapters.process import dies_with_parent, python
from adapters.reader import Reader
from broker.keys import Keys, Shared

RUN = "5eed" * 4
OTHER_RUN = "0dd0" * 4
LOCAL = "127.0.0.1"


class Process:
    """A data server in a process of its own."""

    def __init__(self, shm: Path, state: Path, keys: Path | None, *, ucx: bool) -> None:
        command = python("tests.net.rig", str(shm), str(state), str(keys or ""), "ucx" if ucx else "")
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            preexec_fn=dies_with_parent(),  # noqa: PLW1509  (as the supervisor does)
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.addresses: list[str] = json.loads(self._process.stdout.readline())

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def memory(self) -> int:
        """Bytes of its own, without what it has mapped."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class FarHost:
    """What another host has: an arena, a store, and data servers."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.shm = folder / "far-shm"
        self.state = folder / "far-state"
        self.shm.mkdir()
        self.state.mkdir()
        self.name = this_host(self.shm)
        self.store = DiskStore(self.state / "chunks")
        self.arena = stack.enter_context(SharedMemory(RUN, folder=self.shm, store=self.store))
        self._stack = stack

    def serve(
        self, address: str = LOCAL, *, run: str = RUN, store: bool = True, secure: Secure | None = None
    ) -> list[str]:
        """A server in this process; its addresses."""
        reader = Reader(self.shm, store=self.store if store else None)
        server = DataServer(run, address, reader, secure=secure, ucx=False)
        self._stack.callback(server.close)
        return server.addresses

    def start(self, *, keys: Path | None = None, ucx: bool = False) -> Process:
        """A server in a process of its own."""
        process = Process(self.shm, self.state, keys, ucx=ucx)
        self._stack.callback(process.close)
        return process

    def fetcher(
        self,
        *addresses: str,
        patience_s: float = 60.0,
        silence_s: float = 3.0,
        secure: Secure | None = None,
    ) -> Fetcher:
        """A fetcher that finds this host there, and its store."""
        fetcher = Fetcher(RUN, secure=secure, patience_s=patience_s, silence_s=silence_s)
        self._stack.callback(fetcher.close)
        self.enter(fetcher, *addresses)
        return fetcher

    def enter(self, fetcher: Fetcher, *addresses: str) -> None:
        """Writes the addresses into its book."""
        fetcher.book = {self.name: list(addresses), self.store.name(): list(addresses)}

    def put(self, nbytes: int) -> tuple[Handle, bytes]:
        """A block of noise, and its bytes."""
        # Of a length that no piece is a multiple of: each piece differs from the others.
        noise = np.resize(np.random.default_rng(nbytes).integers(0, 256, 65_537, np.uint8), nbytes)
        return self.arena.put(noise), noise.tobytes()


@contextmanager
def far_host(folder: Path) -> Iterator[FarHost]:
    """A host with nothing on it; at the end nothing is left of it."""
    with ExitStack() as stack:
        far = FarHost(folder, stack)
        yield far
    far.store.close()


def main() -> None:
    """Serves until our input ends."""
    shm, state, keys, ucx = sys.argv[1:]
    reader = Reader(Path(shm), store=DiskStore(Path(state, "chunks")))
    secure = Shared(Keys.load(Path(keys))) if keys else None
    server = DataServer(RUN, LOCAL, reader, secure=secure, ucx=bool(ucx))
    print(json.dumps(server.addresses), flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
