"""A Mooncake of a test's own: master and memory, and processes that put and read. All by real processes."""

from __future__ import annotations

import asyncio
import functools
import json
import logging.handlers
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from adapters.arena import SharedMemory
from adapters.chunk import Chunk, pack_wait, unpack
from adapters.mooncake import MooncakeStore
from adapters.mooncake_client import Address
from adapters.net.landing import Landing
from adapters.process import dies_with_parent, python
from scripts.ports import free_port
from tests.leftovers import until

ROOT = Path(__file__).parents[2]
MEMORY_MIB = 64  #: of each
RUN = "5eed5eed5eed5eed"


def need() -> None:
    """Skips the test where there is no Mooncake, and says what it lacks."""
    if why := _missing():
        pytest.skip(why)


@functools.cache
def _missing() -> str:
    """Looked up in another process: the library opens descriptors that it keeps."""
    code = "from adapters.mooncake_client import library; library()"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stderr.strip().rpartition("\n")[2] if found.returncode else ""


class Moon:
    """A master, and processes that give memory, each on an address of loopback of its own."""

    def __init__(self, folder: Path, *, metadata: bool, client_ttl_s: int) -> None:
        self._client_ttl_s = client_ttl_s
        self.port = free_port()
        self.metadata_port = free_port() if metadata else 0
        self.metrics_port = free_port()
        self.master: subprocess.Popen[bytes]
        self.memory: list[subprocess.Popen[bytes]] = []
        self._log = (folder / "moon.log").open("ab")
        self.start_master()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start_master(self) -> None:
        web = ("--enable_http_metadata_server", f"--http_metadata_server_port={self.metadata_port}")
        where = ("--rpc_address=127.0.0.1", f"--rpc_port={self.port}", f"--client_ttl={self._client_ttl_s}")
        more = ("--metrics_host=127.0.0.1", f"--metrics_port={self.metrics_port}", "--logtostderr")
        self.master = self._start("mooncake.cli", *where, *more, *(web if self.metadata_port else ()))
        until(self._answers, "Mooncake's master")

    @property
    def metadata(self) -> str:
        """Where its processes find each other."""
        if not self.metadata_port:
            return "P2PHANDSHAKE"
        return f"http://127.0.0.1:{self.metadata_port}/metadata"

    def give_memory(self) -> None:
        """One more host."""
        ours = f"127.0.0.{len(self.memory) + 2}"
        where = (f"--host={ours}", f"--port={free_port()}", f"--master_server_address={self.address}")
        more = (
            f"--metadata_server={self.metadata}",
            f"--global_segment_size={MEMORY_MIB}MB",
            "--logtostderr",
        )
        self.memory.append(self._start("mooncake.cli_client", *where, *more))
        until(lambda: len(self.segments()) == len(self.memory), "memory to be known to the master")

    def segments(self) -> list[str]:
        """Whose memory the master knows."""
        return self._ask("get_all_segments")

    def stored(self) -> list[str]:
        """The keys of what lies in it."""
        return self._ask("get_all_keys")

    def _ask(self, what: str) -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/{what}", timeout=60) as got:
            text: str = got.read().decode()
        return text.split()

    def _start(self, module: str, *options: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            python(module, *options),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            preexec_fn=dies_with_parent(),  # noqa: PLW1509 - of one thread, as it asks for
        )

    def _answers(self) -> bool:
        assert self.master.poll() is None, "Mooncake's master has ended"
        return all(map(_listens, filter(None, (self.port, self.metrics_port, self.metadata_port))))

    def close(self) -> None:
        for process in (*self.memory, self.master):
            process.kill()
            process.wait()
        self._log.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def moon(hosts: int, *, metadata: bool = False, client_ttl_s: int = 10) -> Iterator[Moon]:
    """A Mooncake with the memory of so many hosts.

    Args:
        hosts: How many.
        metadata: Whether it has a metadata server.
        client_ttl_s: Silence after which its master takes a process that gives memory for dead.
    """
    need()
    with tempfile.TemporaryDirectory(prefix="omni-test-moon-", dir="/dev/shm") as folder:
        made = Moon(Path(folder), metadata=metadata, client_ttl_s=client_ttl_s)
        try:
            for _ in range(hosts):
                made.give_memory()
            yield made
        finally:
            made.close()


class PeerError(Exception):
    """What a peer's call has raised; ``args``: the kind of the error, and its text."""


class Peer:
    """Another process with a store in the same Mooncake. Its methods are those of :class:`_Server`."""

    def __init__(self, address: str, **settings: Any) -> None:
        text = json.dumps({"address": str(Address(address, space="test"))} | settings)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.adapters.moon", text],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=dies_with_parent(),  # noqa: PLW1509 - of one thread, as it asks for
        )

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.begin(method, *arguments)
            return self.end()

        return call

    def begin(self, method: str, *arguments: Any) -> None:
        """Starts a call; nobody waits for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> Any:
        """Waits for what was begun. Raises PeerError."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer has ended"
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(*answer["error"])
        return answer["value"]

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends it at once, whatever it does."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def peering() -> Iterator[Callable[..., Peer]]:
    """Makes peers of a Mooncake, see :class:`Peer`."""
    with ExitStack() as stack:

        def make(of: Moon | str, **settings: Any) -> Peer:
            peer = Peer(of if isinstance(of, str) else of.address, **settings)
            stack.callback(peer.close)
            return peer

        yield make


def stuff(seed: int, size: int) -> bytes:
    """Bytes that no other seed has."""
    return random.Random(seed).randbytes(size)


# --- in the other process


class _Server:
    """What a peer can do. Bytes are named by seed and size."""

    def __init__(self, address: str, *, patience_s: float = 20.0, full_s: float = 0.5, **fields: Any) -> None:
        where = msgspec.structs.replace(Address.parse(address), **fields)
        self.store = MooncakeStore(where, patience_s=patience_s, full_s=full_s)
        self._said = logging.handlers.BufferingHandler(100)
        logging.getLogger("mooncake").addHandler(self._said)

    def put(self, name: str, seed: int, size: int) -> str:
        return self.store.put(name, memoryview(stuff(seed, size)))

    def read(self, place: str, seed: int, size: int) -> bool:
        """Whether it is what was put."""
        return self.store.read(place, size) == stuff(seed, size)

    def has(self, place: str) -> bool:
        return self.store.has(place)

    def unlink(self, place: str) -> bool:
        return self.store.unlink(place)

    def discard(self, name: str) -> None:
        self.store.discard(name)

    def sweep(self, *keep: str) -> None:
        self.store.sweep(set(keep))

    def hosts(self, place: str) -> int:
        """On how many hosts something lies."""
        key = f"{self.store.address.space}/{place}"
        replicas = self.store.connection.call(lambda store: store.get_replica_desc(key))
        return len({r.get_memory_descriptor().buffer_descriptor.transport_endpoint for r in replicas})

    def said(self) -> list[str]:
        """Its log."""
        return [record.getMessage() for record in self._said.buffer]

    def send(self, name: str) -> str:
        """A chunk whose tensors go to Mooncake at once, encoded as on the wire."""
        with SharedMemory(RUN, store=self.store) as arena:
            chunk = asyncio.run(pack_wait(_payload(), 0, arena, name=name, stored=True))
            assert arena.usage().blocks == 0
        return msgspec.msgpack.encode(chunk).hex()

    def receive(self, text: str) -> list[str]:
        """Lands a chunk, compares its tensors and says where they lay."""
        chunk = msgspec.msgpack.decode(bytes.fromhex(text), type=Chunk)
        released: list[Any] = []
        with SharedMemory(RUN, store=self.store) as arena:
            landing = Landing("f" * 12, None, store=self.store)
            assert landing.foreign(chunk)
            landed = asyncio.run(landing.land(chunk, released.append))
            assert set(released) == {handle.block for handle in chunk.handles}
            assert len(released) == len(chunk.handles)
            found = unpack(landed, arena, released.append)
        for key, tensor in _payload().items():
            assert np.array_equal(found[key], tensor), key
            assert found[key].dtype == tensor.dtype, key
        return [handle.transport for handle in chunk.handles]


def _payload() -> dict[str, Any]:
    noise = np.random.default_rng(3)
    return {
        "floats": noise.standard_normal((40, 300)).astype(np.float32),
        "numbers": noise.integers(0, 99, (3, 20_000)).T,
        "flags": noise.integers(0, 2, 50_000).astype(bool),
    }


def _serve(settings: dict[str, Any]) -> None:
    server = _Server(**settings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        began = time.monotonic()
        try:
            answer = {"value": getattr(server, method)(*arguments)}
        except Exception as error:
            answer = {"error": [type(error).__name__, str(error), time.monotonic() - began]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
