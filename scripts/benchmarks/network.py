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

"mooncake" is what an edge with `transport: mooncake` pays: the first host puts the block into a Mooncake,
where it lies in the memory of both, and the second reads it there. Its processor time is that of Mooncake's
own processes too.
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
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from adapters.arena import SharedMemory
from adapters.handle import Handle
from adapters.host import this_host
from adapters.mooncake import MooncakeStore
from adapters.mooncake_client import Address
from adapters.net.fetch import Fetcher
from adapters.net.movers import has_ucx
from adapters.net.server import DataServer
from adapters.process import dies_with_parent, python
from adapters.segment import shm_dir
from broker.keys import Keys, Shared, make
from scripts.benchmarks.common import Report
from scripts.benchmarks.lan import Lan, missing
from scripts.benchmarks.payload import parser_of

RUN = "be9c400000000001"
SIZES = [1 << 20, 8 << 20, 64 << 20]
WARM_UP = 3
TRANSPORTS = ["zmq", "zmq+curve", "ucx", "mooncake"]
MASTER_PORT, MEMORY_PORT, METRICS_PORT = 50051, 50052, 9003  #: of Mooncake's processes
MEMORY = "1GB"  #: that each host gives to it
NAME = "bench-network"  #: of the request that its tensors are put for
START_S = 30.0

clock = time.perf_counter


class Offer(msgspec.Struct):
    """What the serving process has, as it tells the other."""

    host: str
    plain: list[str]  #: addresses of a data server without keys
    secure: list[str]  #: of one with keys
    raw: int  #: port of the plain socket
    puts: int  #: of one that has blocks put into Mooncake; 0: there is none
    pid: int
    handles: list[Handle]


def main(argv: list[str]) -> None:
    """Runs the benchmark; ``--serve`` and ``--fetch`` are the processes on the two hosts."""
    parser = parser_of("network", __doc__, rounds=20, sizes=SIZES)
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS, choices=TRANSPORTS)
    parser.add_argument("--serve", nargs=2, metavar=("ADDRESS", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--fetch", nargs=2, metavar=("ADDRESS", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--mooncake", nargs="+", metavar=("MASTER", "PID"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        return _serve(options.serve[0], Path(options.serve[1]), options)
    if options.fetch:
        return asyncio.run(_fetch(options))
    if reason := missing():
        sys.exit(f"scripts/bench network: {reason}")
    report = Report("network", argv, packages=["ucxx-cu12", "mooncake-transfer-engine-non-cuda"])
    lacks = {name: why for name in options.transports if (why := _lacks(name))}
    for name, why in lacks.items():
        report.say(f"without {name}: {why}")
    options.transports = [name for name in options.transports if name not in lacks]
    if not options.transports:
        sys.exit("scripts/bench network: nothing is left to measure")
    rows = _between_hosts(options)
    report.table("GB/s, medians", rows)
    report.finish({"rows": rows})
    return None


def _lacks(transport: str) -> str:
    """What a transport needs and this machine has not; "" where it has all."""
    if transport == "ucx" and not has_ucx():
        return "the extra `ucx` is not installed"
    if transport == "mooncake":  # another process looks: the library starts threads when it is loaded
        code = "from adapters.mooncake_client import library; library()"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        error = found.stderr.strip().rpartition("\n")[2]
        return error.partition(": ")[2] if found.returncode else ""  # without the exception's name
    return ""


def _between_hosts(options: argparse.Namespace) -> list[dict[str, Any]]:
    rest = ["--rounds", str(options.rounds), "--sizes", *map(str, options.sizes)]
    rest += ["--transports", *options.transports]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="omni-bench-", dir=shm_dir()))
        lan = stack.enter_context(Lan(2))
        make(Path(folder, "keys"))
        log = stack.enter_context(Path(folder, "log").open("wb"))

        def start(number: int, module: str, *arguments: str, quiet: bool = False) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                lan.inside(number, python(module, *arguments)),
                stdin=subprocess.PIPE,
                stdout=log if quiet else subprocess.PIPE,
                stderr=log if quiet else None,
                preexec_fn=dies_with_parent(),  # noqa: PLW1509  (we have one thread)
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        if "mooncake" in options.transports:
            pids = [str(process.pid) for process in _start_mooncake(lan, partial(start, quiet=True))]
            rest += ["--mooncake", f"{lan.addresses[0]}:{MASTER_PORT}", *pids]
        where = (lan.addresses[0], folder)
        server = start(0, "scripts.benchmarks", "network", *rest, "--serve", *where)
        assert server.stdout is not None
        offer = server.stdout.readline()
        fetcher = start(1, "scripts.benchmarks", "network", *rest, "--fetch", *where)
        result, _ = fetcher.communicate(offer)
        rows: list[dict[str, Any]] = json.loads(result)
    return rows


def _start_mooncake(lan: Lan, start: Callable[..., subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    """A master on the first host, and memory on both; returns when it can be used."""
    master, metrics = f"{lan.addresses[0]}:{MASTER_PORT}", (lan.addresses[0], METRICS_PORT)
    processes = [start(0, "mooncake.cli", f"--rpc_port={MASTER_PORT}")]
    _until(lambda: _listens((lan.addresses[0], MASTER_PORT)), processes)
    memory = (f"--port={MEMORY_PORT}", f"--master_server_address={master}", f"--global_segment_size={MEMORY}")
    for number, address in enumerate(lan.addresses):
        more = (f"--host={address}", "--metadata_server=P2PHANDSHAKE")
        processes.append(start(number, "mooncake.cli_client", *memory, *more))
    url = "http://{}:{}/get_all_segments".format(*metrics)
    _until(lambda: len(urllib.request.urlopen(url, timeout=10).read().split()) == 2, processes)
    return processes


def _listens(where: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(where) == 0


def _until(condition: Callable[[], bool], processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = clock() + START_S
    while not condition():
        if clock() > deadline or any(process.poll() is not None for process in processes):
            sys.exit("scripts/bench network: Mooncake does not start; leave it out with --transports")
        time.sleep(0.05)


# --- the first host


def _serve(address: str, folder: Path, options: argparse.Namespace) -> None:
    sizes: list[int] = options.sizes
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
        puts = 0
        if options.mooncake:
            store = _open_mooncake(options)
            stack.callback(store.leave)
            putter = stack.enter_context(socket.create_server((address, 0)))
            threading.Thread(target=_serve_puts, args=(putter, views, store), daemon=True).start()
            puts = putter.getsockname()[1]
        while has_ucx() and not plain.lends:
            time.sleep(0.01)
        port = listener.getsockname()[1]
        offer = Offer(this_host(shm), plain.addresses, secure.addresses, port, puts, os.getpid(), handles)
        print(msgspec.json.encode(offer).decode(), flush=True)
        sys.stdin.read()
        del views


def _serve_raw(listener: socket.socket, views: list[memoryview]) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while wanted := connection.recv(1):
            connection.sendall(views[wanted[0]])


def _serve_puts(listener: socket.socket, views: list[memoryview], store: MooncakeStore) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while wanted := connection.recv(1):
            connection.sendall(store.put(NAME, views[wanted[0]]).encode())


def _open_mooncake(options: argparse.Namespace) -> MooncakeStore:
    room = 2 * max(options.sizes) // 2**20 + 1
    return MooncakeStore(Address(options.mooncake[0], space="bench", buffer_mib=room))


# --- the second host


class Costs:
    """What one way has cost, round by round."""

    def __init__(self, *others: int) -> None:
        self._others = others  #: processes that take part, beside ours
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
        ticks = 0
        for pid in self._others:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


async def _fetch(options: argparse.Namespace) -> None:
    offer = msgspec.json.decode(sys.stdin.buffer.readline(), type=Offer)
    rows = []
    with ExitStack() as stack:
        raw = stack.enter_context(socket.create_connection((options.fetch[0], offer.raw)))
        ways = {name: _way(name, offer, options, stack) for name in options.transports}
        moon = [int(pid) for pid in (options.mooncake or [])[1:]]
        for number, handle in enumerate(offer.handles):
            into = memoryview(bytearray(handle.nbytes))
            plain = Costs(offer.pid)
            costs = {name: Costs(offer.pid, *(moon if name == "mooncake" else ())) for name in ways}
            for _ in range(WARM_UP + options.rounds):
                with plain.round():
                    _fetch_raw(raw, number, into)
                for name, fetch in ways.items():
                    with costs[name].round():
                        data = await fetch(number)
                    if not np.array_equal(data, into):
                        raise RuntimeError(f"{handle.nbytes} bytes came changed over {name}")
                    del data
            rows += [_row(name, handle.nbytes, cost, plain) for name, cost in costs.items()]
    print(json.dumps(rows))


def _way(
    name: str, offer: Offer, options: argparse.Namespace, stack: ExitStack
) -> Callable[[int], Awaitable[memoryview]]:
    """What brings the n-th block here."""
    address, folder = options.fetch
    if name == "mooncake":
        store = _open_mooncake(options)
        stack.callback(store.leave)
        putter = stack.enter_context(socket.create_connection((address, offer.puts)))
        return partial(_by_mooncake, offer.handles, store, putter)
    keys = Shared(Keys.load(Path(folder, "keys"))) if name == "zmq+curve" else None
    fetcher = stack.enter_context(closing(Fetcher(RUN, secure=keys)))
    fetcher.book = {offer.host: offer.secure if keys else offer.plain}
    transport = name.partition("+")[0]
    return lambda number: fetcher.fetch(offer.handles[number], transport)


async def _by_mooncake(
    handles: list[Handle], store: MooncakeStore, putter: socket.socket, number: int
) -> memoryview:
    putter.send(bytes([number]))
    place = putter.recv(256).decode()  # one small segment
    nbytes = handles[number].nbytes
    data = await store.on_thread(lambda: store.read(place, nbytes), lambda late: None)
    store.unlink(place)  # soon, on a thread of its own
    return memoryview(data)


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
