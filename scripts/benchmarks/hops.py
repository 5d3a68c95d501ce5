"""What the broker costs: hops between empty stages, against a bare ZeroMQ relay, and requests over HTTP.

One hop is one stage's work for one request: the broker assigns the task, the worker's engine hands its input
on, the chunk comes back. The bare relay is a ROUTER that passes each message on, between processes that
answer at once; nothing can be faster on ZeroMQ.

The figures called bare are of a broker without a journal, whose edges keep nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import uvloop
import zmq

from broker.client import Client
from pipelines.graph import Pipeline
from scripts.benchmarks.common import Report, quantile
from scripts.benchmarks.stack import Stack, running
from scripts.ports import free_port

STAGES = ("a", "b", "c", "d")
TURNS = 5
TICKS = os.sysconf("SC_CLK_TCK")


def pipeline() -> Pipeline:
    """Four empty stages in a row."""
    stage = {
        "engine": "function",
        "options": {"op": "pass"},
        "batch": {"max_num_seqs": 256},
        "check_finite": False,
    }
    edges = [{"from": a, "to": b} for a, b in zip(("request", *STAGES), STAGES, strict=False)]
    document = {
        "name": "hops",
        "outputs": {"text": STAGES[-1]},
        "stages": dict.fromkeys(STAGES, stage),
        "edges": edges,
        "endpoints": {"chat": {"outputs": ["text"]}},
    }
    return msgspec.convert(document, Pipeline)


# --- through the broker


async def one(client: Client) -> None:
    """A request through all stages."""
    payload = {"text": "x"}
    stream = await client.submit("hops", outputs=["text"], given={"request": [payload]})
    async with stream:
        answer = [got async for got in stream]
    if answer != [("text", payload)]:
        raise RuntimeError(f"the stages gave {answer}")


async def one_at_a_time(action: Callable[[], Awaitable[None]], times: int) -> list[float]:
    """Seconds of each of so many calls, after a warm-up."""
    for _ in range(times // 10):
        await action()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        await action()
        seconds.append(time.perf_counter() - start)
    return seconds


async def in_flight(action: Callable[[], Awaitable[None]], requests: int, flight: int) -> float:
    """Calls a second with so many always under way."""
    left = iter(range(requests))

    async def caller() -> None:
        for _ in left:
            await action()

    await asyncio.gather(*(action() for _ in range(flight)))
    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(flight)))
    return requests / (time.perf_counter() - start)


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, all its threads."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def turn_by_turn(stacks: Sequence[Stack], requests: int, flight: int) -> list[dict[str, float]]:
    """What each carries, how fast, and what it costs; in turns, so that the machine's moods hit all."""
    rates: list[list[float]] = [[] for _ in stacks]
    costs: list[list[float]] = [[] for _ in stacks]
    latencies: list[list[float]] = [[] for _ in stacks]
    for _ in range(TURNS):
        for number, stack in enumerate(stacks):
            action = partial(one, stack.client)
            before = cpu_s(stack.broker.pid)
            rates[number].append(await in_flight(action, requests, flight) * len(STAGES))
            cpu = cpu_s(stack.broker.pid) - before
            costs[number].append(cpu / (requests + flight) / len(STAGES))
            latencies[number] += [s / len(STAGES) for s in await one_at_a_time(action, 1000 // TURNS)]
    return [
        {
            "hops_per_s": quantile(rate, 0.5),
            "hop_p50_ms": quantile(latency, 0.5) * 1e3,
            "hop_p99_ms": quantile(latency, 0.99) * 1e3,
            "broker_cpu_us_per_hop": quantile(cost, 0.5) * 1e6,
        }
        for rate, cost, latency in zip(rates, costs, latencies, strict=True)
    ]


# --- the bare relay


def _relay(endpoint: str) -> None:
    """Passes [from, to, payload] on, until it is killed."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(endpoint)
    while True:
        _, to, payload = router.recv_multipart()
        router.send_multipart((to, payload))


def _answerer(endpoint: str, name: bytes, following: bytes) -> None:
    """Sends each payload on to the next process."""
    dealer = _dealer(endpoint, name)
    while True:
        dealer.send_multipart((following, dealer.recv()))


def _dealer(endpoint: str, name: bytes) -> zmq.Socket[bytes]:
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, name)
    dealer.connect(endpoint)
    return dealer


def bare_relay(times: int, payload: bytes) -> list[float]:
    """Seconds a hop, one message at a time, through the same number of processes and one ROUTER."""
    spawn = multiprocessing.get_context("spawn")
    names = [name.encode() for name in STAGES]
    with tempfile.TemporaryDirectory(prefix="omni-relay-") as folder:
        endpoint = f"ipc://{folder}/relay"
        processes = [spawn.Process(target=_relay, args=(endpoint,), daemon=True)]
        for name, following in zip(names, [*names[1:], b"caller"], strict=True):
            processes.append(spawn.Process(target=_answerer, args=(endpoint, name, following), daemon=True))
        for process in processes:
            process.start()
        dealer = _dealer(endpoint, b"caller")
        _wait_for_all(dealer, names)
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            dealer.send_multipart((names[0], payload))
            dealer.recv()
            seconds.append((time.perf_counter() - start) / len(STAGES))
        for process in processes:
            process.kill()
            process.join()
        dealer.close(0)
    return seconds


def _wait_for_all(dealer: zmq.Socket[bytes], names: list[bytes]) -> None:
    """Until a message has made the round: a ROUTER drops what is for peers it doesn't know yet."""
    for _ in range(600):
        dealer.send_multipart((names[0], b"?"))
        if dealer.poll(100):
            while dealer.poll(100):
                dealer.recv()
            return
    raise RuntimeError("the relay's processes did not start within a minute")


# --- over HTTP

REQUEST = b'{"model":"hops","messages":[{"role":"user","content":"x"}]}'


class HttpCaller:
    """A connection that posts one chat request after the other and reads just enough of the answers."""

    def __init__(self, port: int) -> None:
        self._port = port
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        kind = f"Content-Type: application/json\r\nContent-Length: {len(REQUEST)}\r\n\r\n"
        self._message = (head + kind).encode() + REQUEST
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __call__(self) -> None:
        """One request. Raises RuntimeError when the answer isn't 200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(self._message)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        body = await reader.readexactly(length)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the gateway answers {body.decode()}")


async def over_http(address: str, requests: int, flight: int) -> float:
    """Chat requests a second, with a gateway in a process of its own."""
    port = free_port()
    command = ("-P", "-m", "broker.gateway", "--port", str(port), "--address", address)
    gateway = await asyncio.create_subprocess_exec(sys.executable, *command, "--log-level", "WARNING")
    try:
        await _until_it_answers(HttpCaller(port))
        callers = [HttpCaller(port) for _ in range(flight)]
        start = 0.0
        left = iter(range(requests))

        async def caller(call: HttpCaller) -> None:
            for _ in left:
                await call()

        await asyncio.gather(*(call() for call in callers))
        start = time.perf_counter()
        await asyncio.gather(*(caller(call) for call in callers))
        return requests / (time.perf_counter() - start)
    finally:
        gateway.terminate()
        await gateway.wait()


async def _until_it_answers(call: HttpCaller) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            await call()
            return
        except (OSError, RuntimeError, asyncio.IncompleteReadError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


async def measure(report: Report, options: argparse.Namespace) -> None:
    """All of it, in one run."""
    message = msgspec.msgpack.encode(["Emit", 1 << 44, 1, 1, [0, True, {"text": "x"}, []]])
    async with running(pipeline()) as kept, running(pipeline(), keeps=False) as without:
        results: dict[str, Any]
        results, bare = await turn_by_turn((kept, without), options.requests, options.flight)
        results["http_requests_per_s"] = await over_http(kept.address, options.requests, options.flight)
    results["bare_hops_per_s"] = bare["hops_per_s"]
    results["bare_hop_p50_ms"] = bare["hop_p50_ms"]
    results["kept_over_bare"] = results["hops_per_s"] / bare["hops_per_s"]
    results["hop_over_bare_hop"] = results["hop_p50_ms"] / bare["hop_p50_ms"]
    relay = bare_relay(4000, message)
    results["zmq_hop_p50_ms"] = quantile(relay, 0.5) * 1e3
    results["hop_over_zmq_hop"] = results["hop_p50_ms"] / results["zmq_hop_p50_ms"]
    report.table(f"Hops, {options.flight} requests in flight, then one at a time", [results])
    report.finish(results)


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="scripts/bench hops", description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=8000, help="requests per measurement")
    parser.add_argument("--flight", type=int, default=64, help="requests in flight")
    options = parser.parse_args(argv)
    uvloop.run(measure(Report("hops", argv), options))
