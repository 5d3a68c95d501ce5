"""One tensor from one process to another: shared memory, against a plain memcpy and against ZeroMQ.

For each size, medians over many rounds, after warm-up rounds, all in one run:

put_get_ms    packing a payload with the tensor in one process (codec, allocation, the copy into shared
              memory) plus unpacking the chunk in another (checks, mapping, view). The message between them
              isn't counted, and the view isn't read.
one_way_ms    from before packing until the other process holds the view; the chunk goes over a Unix socket.
memcpy_ms     copying the same bytes between two private buffers in the packing process, turn by turn with it.
zmq_copy_ms   the bytes through a ZeroMQ PUSH/PULL pair over ipc, zero-copy flags on both sides, from before
              the send until the other process holds the frame.
read_ms       the other process reading every byte of the view once, and
read_own_ms   the same over private memory of its own: what mapping costs a reader afterwards.
hop_ms        through the broker: half the time of a request whose tensor goes from a client to an empty
              stage and from there back, one request at a time. So a hop is one put, one message to the
              broker, one from it, and one get. Absent with --no-broker.
bare_hop_ms   the same with a broker that has no journal, and whose edges keep nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from adapters.arena import SharedMemory
from adapters.chunk import Chunk, pack, unpack
from adapters.handle import BlockId
from broker.client import Client
from pipelines.graph import Edge, Pipeline, Stage
from scripts.benchmarks.common import Report, median_ms, timed
from scripts.benchmarks.stack import running

RUN = "be9c400000000000"
SIZES = [4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20]
WARM_UP = 5
_MESSAGE = 64 << 10

clock = time.perf_counter  # CLOCK_MONOTONIC on Linux: the same in all processes


class Reply(msgspec.Struct, array_like=True):
    """What the receiving process measured of one message, in seconds; ``held`` is a point in time."""

    get: float
    held: float
    read: float = 0.0
    read_own: float = 0.0


def main(argv: list[str]) -> None:
    """Runs the benchmark; ``--peer`` is the receiving process."""
    parser = parser_of("payload", __doc__, rounds=100, sizes=SIZES)
    parser.add_argument("--no-broker", action="store_true", help="leave hop_ms out")
    parser.add_argument("--peer", nargs=2, metavar=("FD", "ENDPOINT"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.peer:
        return _peer(int(options.peer[0]), options.peer[1])
    report = Report("payload", argv)
    with _other_process() as (wire, push):
        rows = [_measure(size, options.rounds, wire, push) for size in options.sizes]
    if not options.no_broker:
        hops = asyncio.run(_through_the_brokers(options.sizes, options.rounds))
        rows = [row | hop for row, hop in zip(rows, hops, strict=True)]
    report.table("Milliseconds, medians", rows)
    report.finish({"rows": rows})
    return None


def parser_of(name: str, doc: str | None, *, rounds: int, sizes: list[int]) -> argparse.ArgumentParser:
    """With the options that all benchmarks of tensors have, and these defaults."""
    parser = argparse.ArgumentParser(
        prog=f"scripts/bench {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="rounds for each size (default %(default)s)"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="bytes of the tensor")
    return parser


def _measure(size: int, rounds: int, wire: socket.socket, push: zmq.Socket[bytes]) -> dict[str, float]:
    source = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    target = np.zeros_like(source)
    memcpy: list[float] = []
    put: list[float] = []
    one_way: list[float] = []
    zmq_copy: list[float] = []

    def copy() -> None:
        memcpy.append(timed(clock, lambda: np.copyto(target, source)))

    def hand_over(arena: SharedMemory, *, read: bool) -> Reply:
        start = clock()
        chunk = pack({"frames": source}, 0, arena, last=read)
        put.append(clock() - start)
        wire.send(msgspec.msgpack.encode(chunk))
        reply = msgspec.msgpack.decode(wire.recv(_MESSAGE), type=Reply)
        one_way.append(reply.held - start)
        for handle in chunk.handles:
            arena.free(handle.block)
        return reply

    with SharedMemory(RUN) as arena:
        replies: list[Reply] = []
        for number in range(WARM_UP + rounds):
            # By turns: whichever comes first finds the source less well cached.
            if number % 2:
                copy()
            replies.append(hand_over(arena, read=False))
            if not number % 2:
                copy()
        put, one_way = put[WARM_UP:], one_way[WARM_UP:]
        put_get = median_ms(put) + median_ms(reply.get for reply in replies[WARM_UP:])
        one_way_ms = median_ms(one_way)
        replies = [hand_over(arena, read=True) for _ in range(WARM_UP + rounds)][WARM_UP:]
    for _ in range(WARM_UP + rounds):
        start = clock()
        push.send(zmq.Frame(source), copy=False)
        zmq_copy.append(msgspec.msgpack.decode(wire.recv(_MESSAGE), type=Reply).held - start)
    return {
        "bytes": size,
        "put_get_ms": put_get,
        "one_way_ms": one_way_ms,
        "memcpy_ms": median_ms(memcpy[WARM_UP:]),
        "zmq_copy_ms": median_ms(zmq_copy[WARM_UP:]),
        "read_ms": median_ms(reply.read for reply in replies),
        "read_own_ms": median_ms(reply.read_own for reply in replies),
    }


async def _through_the_brokers(sizes: list[int], rounds: int) -> list[dict[str, float]]:
    """Milliseconds of a hop for each size, of both brokers turn by turn: the machine's moods hit both."""
    stage = Stage("function", options={"op": "pass"}, check_finite=False)
    pipeline = Pipeline("hop", {"frames": "hop"}, {"hop": stage}, [Edge("request", "hop")])
    async with running(pipeline) as kept, running(pipeline, keeps=False) as bare:
        stacks = {"hop_ms": kept.client, "bare_hop_ms": bare.client}
        return [await _hops(stacks, size, rounds) for size in sizes]


async def _hops(clients: dict[str, Client], size: int, rounds: int) -> dict[str, float]:
    source = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    times: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(WARM_UP + rounds):
        for name, client in clients.items():
            times[name].append(await _hop(client, source))
    return {name: median_ms(seconds[WARM_UP:]) / 2 for name, seconds in times.items()}


async def _hop(client: Client, source: np.ndarray[Any, np.dtype[np.uint8]]) -> float:
    """Seconds of one request. Raises RuntimeError if the tensor has changed."""
    start = clock()
    given = {"request": [{"frames": source}]}
    async with await client.submit("hop", outputs=["frames"], given=given) as stream:
        views = [payload["frames"] async for _, payload in stream]
    seconds = clock() - start
    if not np.array_equal(views[0], source):
        raise RuntimeError(f"the tensor of {source.nbytes} bytes came back changed")
    return seconds


@contextmanager
def _other_process() -> Iterator[tuple[socket.socket, zmq.Socket[bytes]]]:
    """The receiving process, a socket to it for small messages and a ZeroMQ one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, ours, theirs:
        endpoint = f"ipc://{Path(folder) / 'payload.sock'}"
        push = context.socket(zmq.PUSH)
        push.linger = 0
        push.bind(endpoint)
        command = [sys.executable, "-P", "-m", "scripts.benchmarks", "payload", "--peer"]
        peer = subprocess.Popen([*command, str(theirs.fileno()), endpoint], pass_fds=[theirs.fileno()])
        theirs.close()
        try:
            yield ours, push
        finally:
            ours.close()  # the peer leaves at the end of its input
            peer.wait(10)
            push.close()


def _peer(fd: int, endpoint: str) -> None:
    released: list[BlockId] = []
    with socket.socket(fileno=fd) as wire, zmq.Context() as context, SharedMemory(RUN) as arena:
        pull = context.socket(zmq.PULL)
        pull.connect(endpoint)
        poller = zmq.Poller()
        poller.register(pull, zmq.POLLIN)
        poller.register(wire, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if pull in ready:
                frame = pull.recv(copy=False)
                reply = Reply(0.0, clock())
                del frame
            else:
                message = wire.recv(_MESSAGE)
                if not message:
                    break
                chunk = msgspec.msgpack.decode(message, type=Chunk)
                start = clock()
                view = unpack(chunk, arena, released.append)["frames"]
                held = clock()
                reply = Reply(held - start, held)
                if chunk.last:
                    own = np.ones_like(view)
                    _read(own)  # now its pages are there, and cached as those of the view are
                    reply = Reply(held - start, held, _read(view), _read(own))
                del view
            wire.send(msgspec.msgpack.encode(reply))
        pull.close(0)


def _read(array: np.ndarray[Any, Any]) -> float:
    """Seconds to read every byte."""
    words = array.view(np.uint64)
    return timed(clock, words.max)
