"""One tensor from one host to another: the ways between machines, against two plain TCP sockets.

Two network namespaces on a bridge stand for the hosts; bytes go through the kernel's TCP, but over no wire,
so this measures what each way costs in work. A process on the first has blocks in shared memory and serves
them; one on the second asks for one after the other. Needs root and `ip`.

gbytes_per_s          of a fetch, from asking to having the whole block in memory of its own, median
raw_tcp_gbytes_per_s  of the same block through two sockets: sendall out of the mapping, and recv_into the
                      same buffer again and again; turn by turn with the fetches
of_raw                the one divided by the other
cpu_s_per_gb          processor time of both processes, a mean: what counts where the network is slower,
                      and what a busy machine changes less
raw_cpu_s_per_gb      the same for the plain sockets
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from adapters.arena import SharedMemory
from adapters.handle import Handle
from adapters.host import this_host
from adapters.net.fetch import Fetcher
from adapters.net.movers import has_ucx
from adapters.net.server import DataServer
from adapters.process import dies_with_parent
from adapters.segment import shm_dir
from broker.keys import Keys, Shared, make
from scripts.benchmarks.common import Report
from scripts.benchmarks.lan import Lan, missing

RUN = "be9c400000000001"
SIZES = [1 << 20, 8 << 20, 64 << 20]
WARM_UP = 3
TRANSPORTS = ["zmq", "zmq+curve", *(["ucx"] if has_ucx() else [])]

clock = time.perf_counter


class Offer(msgspec.Struct):
    """What the serving process has, as it tells the other."""

    host: str
    plain: list[str]  #: addresses of a data server without keys
    secure: list[str]  #: of one with keys
    raw: int  #: port of the plain socket
    pid: int
    handles: list[Handle]


def main(argv: list[str]) -> None:
    """Runs the benchmark; ``--serve`` and ``--fetch`` are the processes on the two hosts."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench network",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=20, help="rounds for each size (default 20)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the tensor")
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS, choices=TRANSPORTS)
    parser.add_argument("--serve", nargs=2, metavar=("ADDRESS", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--fetch", nargs=2, metavar=("ADDRESS", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        return _serve(options.serve[0], Path(options.serve[1]), options.sizes)
    if options.fetch:
        return asyncio.run(_fetch(options.fetch[0], Path(options.fetch[1]), options))
    if reason := missing():
        sys.exit(f"scripts/bench network: {reason}")
    report = Report("network", argv, packages=["ucxx-cu12"])
    rows = _between_hosts(options)
    report.table("GB/s, medians", rows)
    report.finish({"rows": rows})
    return None


def _between_hosts(options: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, "-P", "-m", "scripts.benchmarks", "network", "--rounds", str(options.rounds)]
    command += ["--sizes", *map(str, options.sizes), "--transports", *options.transports]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="omni-bench-", dir=shm_dir()))
        lan = stack.enter_context(Lan(2))
        make(Path(folder, "keys"))

        def start(number: int, role: str) -> subprocess.Popen[bytes]:
            line = lan.inside(number, [*command, role, lan.addresses[0], folder])
            process = subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                preexec_fn=dies_with_parent(),  # noqa: PLW1509  (we have one thread)
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        server = start(0, "--serve")
        assert server.stdout is not None
        offer = server.stdout.readline()
        result, _ = start(1, "--fetch").communicate(offer)
        rows: list[dict[str, Any]] = json.loads(result)
    return rows


# --- the first host


def _serve(address: str, folder: Path, sizes: list[int]) -> None:
    shm = folder / "shm"
    shm.mkdir()
    with ExitStack() as stack:
        arena = stack.enter_context(SharedMemory(RUN, folder=shm, ceiling=2 * sum(sizes) + (64 << 20)))
        handles = [arena.put(np.resize(np.arange(65_537, dtype=np.uint8), size)) for size in sizes]
        plain = stack.enter_context(closing(DataServer(RUN, address, arena.reader, secure=None)))
        keys = Shared(Keys.load(folder / "keys"))
        secure = stack.enter_context(closing(DataServer(RUN, address, arena.reader, secure=keys)))
        listener = stack.enter_context(socket.create_server((address, 0)))
        views = [arena.reader.view(handle) for handle in handles]
        threading.Thread(target=_serve_raw, args=(listener, views), daemon=True).start()
        while has_ucx() and not plain.lends:
            time.sleep(0.01)
        port = listener.getsockname()[1]
        offer = Offer(this_host(shm), plain.addresses, secure.addresses, port, os.getpid(), handles)
        print(msgspec.json.encode(offer).decode(), flush=True)
        sys.stdin.read()
        del views


def _serve_raw(listener: socket.socket, views: list[memoryview]) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while wanted := connection.recv(1):
            connection.sendall(views[wanted[0]])


# --- the second host


class Costs:
    """What one way has cost, round by round."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._seconds: list[float] = []
        self._cpu: list[float] = []

    @contextmanager
    def round(self) -> Iterator[None]:
        """Measures what is inside."""
        cpu, start = self._both(), clock()
        yield
        self._seconds.append(clock() - start)
        self._cpu.append(self._both() - cpu)

    def rate(self, nbytes: int) -> float:
        """GB/s, the median."""
        return nbytes / 1e9 / statistics.median(self._seconds[WARM_UP:])

    def cpu(self, nbytes: int) -> float:
        """Seconds per GB, the mean: the server's time is counted in steps of 10 ms."""
        return statistics.fmean(self._cpu[WARM_UP:]) / nbytes * 1e9

    def _both(self) -> float:
        fields = Path(f"/proc/{self._server}/stat").read_text().rpartition(")")[2].split()
        return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _fetch(address: str, folder: Path, options: argparse.Namespace) -> None:
    offer = msgspec.json.decode(sys.stdin.buffer.readline(), type=Offer)
    ways = {"zmq": ("zmq", offer.plain), "zmq+curve": ("zmq", offer.secure), "ucx": ("ucx", offer.plain)}
    rows = []
    with ExitStack() as stack:
        raw = stack.enter_context(socket.create_connection((address, offer.raw)))
        fetchers = {}
        for name in options.transports:
            keys = Shared(Keys.load(folder / "keys")) if name == "zmq+curve" else None
            fetcher = fetchers[name] = stack.enter_context(closing(Fetcher(RUN, secure=keys)))
            fetcher.book = {offer.host: ways[name][1]}
        for number, handle in enumerate(offer.handles):
            into = memoryview(bytearray(handle.nbytes))
            plain, costs = Costs(offer.pid), {name: Costs(offer.pid) for name in fetchers}
            for _ in range(WARM_UP + options.rounds):
                with plain.round():
                    _fetch_raw(raw, number, into)
                for name, fetcher in fetchers.items():
                    with costs[name].round():
                        data = await fetcher.fetch(handle, ways[name][0])
                    if not np.array_equal(data, into):
                        raise RuntimeError(f"{handle.nbytes} bytes came changed over {name}")
                    del data
            rows += [_row(name, handle.nbytes, cost, plain) for name, cost in costs.items()]
    print(json.dumps(rows))


def _row(name: str, nbytes: int, cost: Costs, raw: Costs) -> dict[str, Any]:
    return {
        "transport": name,
        "bytes": nbytes,
        "gbytes_per_s": cost.rate(nbytes),
        "raw_tcp_gbytes_per_s": raw.rate(nbytes),
        "of_raw": cost.rate(nbytes) / raw.rate(nbytes),
        "cpu_s_per_gb": cost.cpu(nbytes),
        "raw_cpu_s_per_gb": raw.cpu(nbytes),
    }


def _fetch_raw(connection: socket.socket, number: int, into: memoryview) -> None:
    connection.send(bytes([number]))
    here = 0
    while here < len(into):
        here += connection.recv_into(into[here:])
