"""What callers lose while hosts are cut off, or all their processes or the broker killed, at random.

Four hosts have the workers of a pipeline of four stages, a fifth the broker and the gateway. Each stage is on
two hosts, and tensors go from host to host between the last three. Every answer must equal the undisturbed
one bit for bit. A host is back a while after each strike: its link works again, or guardians are started
there as at its first start. Any link may be cut, the broker's too. Needs root and `ip` (iproute2).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import uvloop
import yaml

from scripts.benchmarks.callers import TOLD, Death
from scripts.benchmarks.common import Report, quantile
from scripts.benchmarks.hosts import Cluster, cluster
from scripts.benchmarks.lan import missing
from scripts.benchmarks.recovery import PROMPTS, Load, Outcome, difference

NAME = "hosts"
WORKERS = {
    1: ["hosts/say", "hosts/tone"],
    2: ["hosts/tone", "hosts/mix"],
    3: ["hosts/mix", "hosts/last"],
    4: ["hosts/last", "hosts/say"],
}
PAUSE_S = 0.12  #: between two words
SHORT_S = (0.3, 3.5)  #: cuts that nobody is given up for, which is after 6 s of silence,
LONG_S = (7.0, 10.0)  #: and others
DEAD_S = (0.0, 2.0)  #: from a host's death until its guardians are started
BETWEEN_S = (0.3, 1.5)
BACK_S = 60.0  #: so long after the end of a strike all workers are there
EMPTY_S = 30.0


def pipeline(checkpoint: str) -> dict[str, Any]:
    """A voice without a model: words, a tone of 47 KiB for each, handed on twice."""
    edge = {"checkpoint": checkpoint}
    ops = {"say": {"op": "say"}, "tone": {"op": "tone", "word_s": 0.5}, "mix": {}, "last": {}}
    return {
        "name": NAME,
        "outputs": {"text": "say", "audio": "last"},
        "endpoints": {"chat": {"outputs": ["text", "audio"]}},
        "stages": {
            stage: {"engine": "function", "batch": {"max_num_seqs": 64}, "options": options}
            for stage, options in ops.items()
        },
        "edges": [
            {"from": "request", "to": "say"},
            {"from": "say", "to": "tone", **edge},
            {"from": "tone", "to": "mix", **edge},
            {"from": "mix", "to": "last", **edge},
        ],
    }


def body(model: str, number: int, pause_s: float = PAUSE_S) -> dict[str, Any]:
    """The n-th request, of 10 to 31 words with a pause between them."""
    text = " ".join(f"w{number}-{word}" for word in range(10 + 3 * (number % PROMPTS)))
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "pcm16"},
        "seed": number,
        "stream": True,
        "sampling_params_list": [{"chunk_sleep_s": pause_s}, None, None, None],
    }


class Strike(NamedTuple):
    """What was done to which hosts, and how soon they were all back."""

    kind: str
    hosts: int
    seconds: float  #: that it lasted
    back_s: float | None  #: from its end until every worker was there; None: not in :data:`BACK_S`


class Strikes:
    """Strikes hosts with workers, one kind after the other."""

    def __init__(self, home: Cluster, load: Load, seed: int) -> None:
        self._home = home
        self._load = load
        self._random = random.Random(seed)

    def deck(self, kinds: Sequence[str], rounds: int) -> list[str]:
        """So many kinds: each as often as the others, in random order."""
        dealt: list[str] = []
        while len(dealt) < rounds:
            dealt += self._random.sample(list(kinds), len(kinds))
        return dealt[:rounds]

    async def strike(self, kind: str) -> Strike:
        """One strike at a random moment, and its end; returns when all workers are back."""
        await asyncio.sleep(self._random.uniform(*BETWEEN_S))
        if kind == "broker killed":
            numbers = [0]
        elif kind == "host killed":
            numbers = self._random.sample(sorted(WORKERS), 1)
        else:
            numbers = self._random.sample([0, *WORKERS], self._random.randint(1, len(WORKERS) // 2))
        seconds = self._random.uniform(*KINDS[kind])
        death = Death(kind, time.monotonic())
        for caller in self._load.callers:
            if caller.streaming:
                caller.touched(death, "audio")
        if kind == "broker killed":
            await asyncio.to_thread(self._home.kill_broker)
        elif kind == "host killed":
            await self._kill(numbers, seconds)
        else:
            await self._cut(numbers, seconds)
        return Strike(kind, len(numbers), seconds, await self._back())

    async def _cut(self, numbers: Sequence[int], seconds: float) -> None:
        for number in numbers:
            self._home.hosts[number].cut()
        await asyncio.sleep(seconds)
        for number in numbers:
            self._home.hosts[number].restore()

    async def _kill(self, numbers: Sequence[int], seconds: float) -> None:
        for number in numbers:
            await asyncio.to_thread(self._home.hosts[number].kill_all)
        await asyncio.sleep(seconds)
        for number in numbers:
            for stage in WORKERS[number]:
                self._home.worker(number, stage)

    async def _back(self) -> float | None:
        began = time.monotonic()
        try:
            await asyncio.to_thread(self._home.until, self._all_there, BACK_S)
        except TimeoutError:
            return None
        return time.monotonic() - began

    def _all_there(self) -> bool:
        stages = {stage for stages in WORKERS.values() for stage in stages}
        there = {(worker.host, stage) for stage in stages for worker in self._home.workers(stage)}
        return there >= {(host, stage) for host, stages in WORKERS.items() for stage in stages}


#: Kind -> the seconds that it lasts.
KINDS = {"short cut": SHORT_S, "long cut": LONG_S, "host killed": DEAD_S, "broker killed": (0.0, 0.0)}


def table(strikes: Sequence[Strike], load: Load) -> list[dict[str, Any]]:
    """One row a kind."""
    resumed = [each for outcome in load.outcomes for each in outcome.caller.resumed]
    rows = []
    for kind in KINDS:
        of_kind = [strike for strike in strikes if strike.kind == kind]
        seconds = [each.seconds for each in resumed if each.kind == kind]
        back = [strike.back_s for strike in of_kind if strike.back_s is not None]
        if of_kind:
            rows.append(
                {
                    "strike": kind,
                    "times": len(of_kind),
                    "hosts": sum(strike.hosts for strike in of_kind),
                    "next audio p50 s": quantile(seconds, 0.5) if seconds else "-",
                    "longest s": max(seconds) if seconds else "-",
                    "workers back p50 s": quantile(back, 0.5) if back else "-",
                }
            )
    return rows


def verdict(load: Load, strikes: Sequence[Strike]) -> dict[str, Any]:
    """What the callers saw."""

    def told(outcome: Outcome) -> bool:
        return outcome.why.startswith(TOLD)

    unanswered = [outcome for outcome in load.outcomes if outcome.answer is None]
    unequal = [difference(o, load.references[o.pipeline, o.number]) for o in load.outcomes]
    callers = [outcome.caller for outcome in load.outcomes]
    return {
        "requests": len(load.outcomes),
        "strikes": len(strikes),
        "lost": sum(not told(outcome) for outcome in unanswered),
        "honest_errors": sum(map(told, unanswered)),
        "duplicated_chunks": sum(caller.duplicated for caller in callers),
        "gaps": sum(caller.gaps for caller in callers),
        "unequal": len(list(filter(None, unequal))),
        "posted_again": sum(caller.posted - 1 for caller in callers),
        "not_back": sum(strike.back_s is None for strike in strikes),
        "why": dict(Counter(outcome.why for outcome in unanswered)),
        "why_unequal": list(filter(None, unequal))[:20],
        "strikes_by_kind": table(strikes, load),
    }


async def disturbed(home: Cluster, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """The load and all the strikes; figures but for what the end leaves."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:
        hurried = Load(home.url, session, [NAME], partial(body, pause_s=0.0))
        await hurried.undisturbed()
        load = Load(home.url, session, [NAME], body)
        load.references = hurried.references
        running = asyncio.create_task(load.run(options.streams))
        strikes = Strikes(home, load, options.seed)
        happened: list[Strike] = []
        try:
            for number, kind in enumerate(strikes.deck(options.kinds, options.rounds), 1):
                strike = await strikes.strike(kind)
                happened.append(strike)
                back = "not back" if strike.back_s is None else f"back after {strike.back_s:.1f} s"
                say(f"{number:>4} {kind} of {strike.hosts} for {strike.seconds:.1f} s: {back}")
            load.finish()
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return {
            **verdict(load, happened),
            "left_in_tables": await asyncio.to_thread(home.tables, EMPTY_S),
            "orphaned_segments": await asyncio.to_thread(home.memory, EMPTY_S),
        }


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything, from the start of a cluster to its end. Raises RuntimeError where there can be no hosts."""
    if why := missing():
        raise RuntimeError(why)
    with tempfile.TemporaryDirectory() as folder, cluster(1 + len(WORKERS)) as home:
        file = Path(folder) / f"{NAME}.yaml"
        file.write_text(yaml.safe_dump(pipeline(options.checkpoint)))
        home.start("--pipeline", str(file))
        home.place(WORKERS)
        began = time.monotonic()
        results = uvloop.run(disturbed(home, options, say))
        seconds = time.monotonic() - began
        leaks = home.stop()
        if options.log:
            options.log.write("\n".join(host.log for host in home.hosts))
        return {
            **results,
            "tracebacks": sum(host.log.count("Traceback (most recent call last)") for host in home.hosts),
            "seconds": seconds,
            "leaked_segments": leaks.segments,
            "leaked_processes": leaks.processes,
            "leaked_files": leaks.files,
            "left": {h.address: h.segments() + h.files() for h in home.hosts if h.segments() or h.files()},
        }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench partitions", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="strikes in all")
    parser.add_argument("--streams", type=int, default=8, help="requests at once")
    parser.add_argument("--checkpoint", choices=("none", "memory", "disk"), default="memory")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=argparse.FileType("w"), help="a file for what all processes said")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark."""
    options, report = parse(argv), Report("partitions", argv, ["aiohttp"])
    try:
        results = measure(options, report.say)
    except RuntimeError as error:
        sys.exit(f"scripts/bench partitions: {error}")
    report.table("Strikes", results["strikes_by_kind"])
    simple = {key: value for key, value in results.items() if not isinstance(value, dict | list)}
    report.table("Outcome", [{"figure": key, "value": value} for key, value in simple.items()])
    for key in ("why", "why_unequal", "left_in_tables", "orphaned_segments", "left"):
        if results[key]:
            report.say(f"{key}: {results[key]}")
    report.finish(results)
