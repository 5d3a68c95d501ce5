"""One tensor from one process to another: shared memory, against a plain memcpy and against ZeroMQ.

For each size, medians over many rounds, after warm-up rounds, all in one run:

put_get_ms    packing a payload with the tensor in one process (codec, allocation, the copy into shared memory)
              plus unpacking the chunk in another (checks, mapping, view). The message between them isn't counted,
              and the view isn't read.
one_way_ms    from before packing until the other process holds the view, the chunk sent over a Unix socket.
read_ms       the other process reading every byte of the view once, and
read_own_ms   the same over private memory of its own: what mapping costs a reader afterwards.
memcpy_ms     copying the same bytes between two private buffers in the packing process, turn by turn with it.
zmq_copy_ms   the bytes through a ZeroMQ PUSH/PULL pair over ipc, zero-copy flags on both sides, from before the
              send until the other process holds the frame.
hop_ms        through the broker and a worker and back, as one request.
"""

from __future__ import annotations

import argparse
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
from scripts.benchmarks.common import Report, median_ms, timed

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
    parser = argparse.ArgumentParser(
        prog="scripts/bench payload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=50, help="rounds for each size (default 50)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the tensor")
    parser.add_argument("--peer", nargs=2, metavar=("FD", "ENDPOINT"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.peer:
        return _peer(int(options.peer[0]), options.peer[1])
    report = Report("payload", argv)
    with _other_process() as (wire, push):
        rows = [_measure(size, options.rounds, wire, push) for size in options.sizes]
    report.table("Milliseconds, medians", rows)
    report.finish({"rows": rows})
    return None


def _measure(size: int, rounds: int, wire: socket.socket, push: zmq.Socket[bytes]) -> dict[str, float]:
    source = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    target = np.zeros_like(source)
    memcpy: list[float] = []
    put: list[float] = []
    one_way: list[float] = []
    shm: list[Reply] = []
    zmq_copy: list[float] = []
    with SharedMemory(RUN) as arena:
        for _ in range(WARM_UP + rounds):
            memcpy.append(timed(clock, lambda: np.copyto(target, source)))
            start = clock()
            chunk = pack({"frames": source}, 0, arena)
            put.append(clock() - start)
            wire.send(msgspec.msgpack.encode(chunk))
            shm.append(msgspec.msgpack.decode(wire.recv(_MESSAGE), type=Reply))
            one_way.append(shm[-1].held - start)
            for handle in chunk.handles:
                arena.free(handle.block)
    for _ in range(WARM_UP + rounds):
        start = clock()
        push.send(source, copy=False)
        zmq_copy.append(msgspec.msgpack.decode(wire.recv(_MESSAGE), type=Reply).held - start)
    return {
        "bytes": size,
        "put_get_ms": median_ms(put[WARM_UP:]) + median_ms(reply.get for reply in shm[WARM_UP:]),
        "one_way_ms": median_ms(one_way[WARM_UP:]),
        "memcpy_ms": median_ms(memcpy[WARM_UP:]),
        "zmq_copy_ms": median_ms(zmq_copy[WARM_UP:]),
        "read_ms": median_ms(reply.read for reply in shm[WARM_UP:]),
        "read_own_ms": median_ms(reply.read_own for reply in shm[WARM_UP:]),
    }


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
        own = np.zeros(0, np.uint8)
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
                if own.size != view.size:
                    own = np.ones_like(view)
                reply = Reply(
                    held - start, held, timed(clock, lambda: _read(view)), timed(clock, lambda: _read(own))
                )
                del view
            wire.send(msgspec.msgpack.encode(reply))
        pull.close(0)


def _read(array: np.ndarray[Any, Any]) -> int:
    return int(array.view(np.uint64).max())
