"""A thousand killed engines, then a thousand callers that leave: what stays behind, and what grows.

Engines of `echo` are killed one after the other, the oldest first, while requests run. Nothing may stay of
them: no shared memory, process or socket; and a house that is started again serves without a hand. Then
callers ask for long answers and leave after a second: the broker's tables must be empty afterwards, and the
memory of broker, gateway and workers must not have grown with their number.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import uvloop

from scripts.benchmarks.callers import Caller, Lost
from scripts.benchmarks.common import Report
from scripts.benchmarks.house import House, Leaks, house, memory_mib, send, told

STAGES = ("say", "tone", "picture", "sum")
EMPTY_S = 60.0
READY_S = 120.0
SETTLE = 0.25  #: of the abandoned requests, until memory has found its size


class Sample(NamedTuple):
    """Resident memory after so many abandoned requests, in MiB."""

    requests: int
    broker: float
    gateway: float
    workers: float


def body(words: int, pause_s: float) -> dict[str, Any]:
    """A streamed chat in text and speech of so many words."""
    return {
        "model": "echo",
        "messages": [{"role": "user", "content": " ".join(f"w{number}" for number in range(words))}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "pcm16"},
        "sampling_params_list": [{"chunk_sleep_s": pause_s}, None, None, None],
        "stream": True,
    }


# --- killing engines


async def kill_engines(
    home: House, session: aiohttp.ClientSession, kills: int, every_s: float
) -> dict[str, Any]:
    """So many SIGKILLs with two callers at work; what is left of the dead while the house still runs."""
    over, done, lost = asyncio.Event(), 0, 0

    async def keep_asking() -> None:
        nonlocal done, lost
        while not over.is_set():
            try:
                await Caller(session, home.url, body(8, 0.05)).run()
                done += 1
            except Lost:
                lost += 1

    callers = [asyncio.create_task(keep_asking()) for _ in range(2)]
    try:
        for _ in range(kills):
            await asyncio.sleep(every_s)
            await _kill_oldest(home)
    finally:
        over.set()
        await asyncio.gather(*callers)
    ready = await home.ready(READY_S)
    return {
        "engines_killed": kills,
        "answered": done,
        "lost": lost,
        "ready_again": ready,
        "left_in_tables": await home.tables(EMPTY_S),
        "orphaned_segments": await home.orphans(EMPTY_S),
    }


async def _kill_oldest(home: House) -> None:
    while True:
        engines = sorted((p for p in home.processes() if p.role == "engine"), key=lambda p: p.began)
        if engines and send(engines[0].pid, signal.SIGKILL):
            return
        await asyncio.sleep(0.05)


# --- leaving


async def abandon(
    home: House, session: aiohttp.ClientSession, number: int, *, after_s: float, at_once: int = 4
) -> list[Sample]:
    """So many requests whose callers leave; memory as it went."""
    left = itertools.count()
    samples = [await _sample(home, 0)]

    async def leave() -> None:
        for request in left:
            if request >= number:
                return
            with suppress(TimeoutError, aiohttp.ClientError):
                timeout = aiohttp.ClientTimeout(total=after_s)
                chat = session.post(f"{home.url}/v1/chat/completions", json=body(400, 0.01), timeout=timeout)
                async with chat as answer:
                    await answer.read()
            if request % max(number // 40, at_once) == 0:
                samples.append(await _sample(home, request))

    await asyncio.gather(*(leave() for _ in range(at_once)))
    return samples


async def _sample(home: House, requests: int) -> Sample:
    processes = await asyncio.to_thread(home.processes)
    groups = {"broker": ["broker"], "gateway": ["gateway"], "workers": ["engine", "guardian"]}
    found = {
        name: memory_mib([process.pid for process in processes if process.role in roles])
        for name, roles in groups.items()
    }
    return Sample(requests, **found)


def slopes(samples: Sequence[Sample]) -> dict[str, float]:
    """KiB a request, by least squares over all but the first requests."""
    last = samples[-1].requests
    steady = [sample for sample in samples if sample.requests >= last * SETTLE]
    requests = [sample.requests for sample in steady]
    names = ("broker", "gateway", "workers")
    return {
        f"{name}_kib_per_request": float(np.polyfit(requests, [getattr(s, name) for s in steady], 1)[0])
        * 1024
        for name in names
    }


# --- the run


async def killing(kills: int, every_s: float, replicas: int) -> dict[str, Any]:
    """The first half: killed engines, the end of the house, and another one in the same folders."""
    # Without the attempts a request that was hit three times would be kept as a dead letter.
    own = [
        text for stage in STAGES for text in (f"{stage}.replicas={replicas}", f"{stage}.attempts={kills + 1}")
    ]
    options = told(["echo"], own)
    async with house(options) as home, aiohttp.ClientSession() as session:
        results = await kill_engines(home, session, kills, every_s)
        leaks = await home.stop()
        began = time.monotonic()
        await home.start()
        await Caller(session, home.url, body(3, 0.0)).run()
        again = time.monotonic() - began
        last = await home.stop()
    return {**results, **_named(leaks), "served_again_after_s": again, "leaked_after_restart": sum(last)}


async def leaving(number: int, after_s: float = 1.0) -> dict[str, Any]:
    """The second half: callers that leave."""
    async with house(told(["echo"])) as home, aiohttp.ClientSession() as session:
        samples = await abandon(home, session, number, after_s=after_s)
        tables = await home.tables(EMPTY_S)
        orphans = await home.orphans(EMPTY_S)
        leaks = await home.stop()
    return {
        "abandoned": number,
        "left_in_tables": tables,
        "orphaned_segments": orphans,
        **_named(leaks),
        **slopes(samples),
        "samples_mib": [list(sample) for sample in samples],
    }


def _named(leaks: Leaks) -> dict[str, int]:
    return {f"leaked_{name}": number for name, number in leaks._asdict().items()}


async def _main(report: Report, options: argparse.Namespace) -> None:
    results: dict[str, Any] = {}
    if options.kills:
        results["kills"] = await killing(options.kills, options.seconds_between, options.replicas)
    if options.abandon:
        results["abandon"] = await leaving(options.abandon)
    for name, figures in results.items():
        shown = [{"figure": key, "value": value} for key, value in figures.items() if key != "samples_mib"]
        report.table(name, shown)
    report.finish(results)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="engines to kill; 0: none")
    parser.add_argument("--abandon", type=int, default=960, help="requests to leave after 1 s; 0: none")
    # A guardian waits longer and longer with an engine that dies again within 20 s of its start.
    parser.add_argument("--seconds-between", type=float, default=0.7, help="between two kills")
    parser.add_argument("--replicas", type=int, default=8, help="engines of each of the four stages")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark."""
    uvloop.run(_main(Report("soak", argv, ["aiohttp"]), parse(argv)))
