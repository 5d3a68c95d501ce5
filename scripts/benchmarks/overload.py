"""More requests than `echo` can serve: what still gets done, how long it takes, and how the rest is refused.

Each request keeps one of the stage's places for a fixed time, so places over seconds is the capacity, and the
processors have room. Arrivals are random (Poisson) and don't wait for answers; a request's time counts from
the moment it was due to be sent. Goodput is the rate of whole answers, without the first seconds of a level.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import uvloop

from pipelines import loader
from pipelines.graph import Limits
from scripts.benchmarks.common import Report, quantile
from scripts.benchmarks.house import House, house, memory_mib, told

LEVELS = (0.5, 1.0, 2.0, 4.0)
WARM_S = 1.0
EMPTY_S = 60.0  #: the tables are empty as soon as the broker has heard of the last end; no bound is claimed
PATIENCE_S = 60.0
REFUSED = (429, 503)
WORDS = "one two three four"


class Answered(NamedTuple):
    """How one request went."""

    status: int  #: 0: the connection broke or nothing came
    hint: bool  #: whether there was a Retry-After
    whole: bool
    ended: float  #: seconds since the level's start
    seconds: float  #: since it was due to be sent


def document(folder: Path, places: int, queue: int) -> str:
    """Writes `echo` with so many places in its first stage and so many requests let in; the file's path."""
    echo = loader.load("echo", [f"say.max_num_seqs={places}"])
    limited = msgspec.structs.replace(echo, limits=Limits(max_requests=places + queue))
    file = folder / "echo.yaml"
    file.write_bytes(msgspec.json.encode(limited))
    return str(file)


def body(service_s: float) -> dict[str, Any]:
    """A chat that keeps its place for so long."""
    pause = service_s / len(WORDS.split())
    return {
        "model": "echo",
        "messages": [{"role": "user", "content": WORDS}],
        "sampling_params_list": [{"chunk_sleep_s": pause}, None, None, None],
    }


def arrivals(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """When requests are due, at so many a second on the average."""
    source = random.Random(seed)
    due = source.expovariate(rate)
    while due < seconds:
        yield due
        due += source.expovariate(rate)


async def ask(
    session: aiohttp.ClientSession, url: str, request: dict[str, Any], began: float, due: float
) -> Answered:
    """One request, sent when it is due."""
    await asyncio.sleep(began + due - time.monotonic())
    try:
        async with session.post(f"{url}/v1/chat/completions", json=request) as answer:
            text = await answer.text()
            status, hint = answer.status, answer.headers.get("Retry-After", "").isdigit()
    except (aiohttp.ClientError, OSError, TimeoutError):
        status, hint, text = 0, False, ""
    now = time.monotonic() - began
    return Answered(status, hint, status == 200 and WORDS in text, now, now - due)


async def level(
    session: aiohttp.ClientSession, home: House, options: argparse.Namespace, load: float
) -> dict[str, Any]:
    """One level of load to its last answer. Raises RuntimeError when nothing at all is served."""
    request, capacity = body(options.service), options.places / options.service
    began = time.monotonic()
    due = arrivals(load * capacity, options.seconds, seed=options.seed)
    answers = await asyncio.gather(*(ask(session, home.url, request, began, at) for at in due))
    admitted = [a for a in answers if a.whole]
    if not admitted:
        raise RuntimeError(f"no whole answer came; HTTP statuses: {Counter(a.status for a in answers)}")
    refused = [a for a in answers if a.status in REFUSED]
    steady = sum(WARM_S < a.ended <= options.seconds for a in admitted)
    return {
        "load": load,
        "offered_per_s": len(answers) / options.seconds,
        "goodput": steady / (options.seconds - WARM_S),
        "admitted": len(admitted),
        "refused": len(refused),
        "p50_ms": quantile([a.seconds for a in admitted], 0.5) * 1e3,
        "p99_ms": quantile([a.seconds for a in admitted], 0.99) * 1e3,
        "refused_p99_ms": quantile([a.seconds for a in refused], 0.99) * 1e3 if refused else 0.0,
        "bad_refusals": sum(not a.whole and not (a.status in REFUSED and a.hint) for a in answers),
        "statuses": dict(Counter(str(a.status) for a in answers)),
        "memory_mib": memory(home),
    }


def memory(home: House) -> float:
    """Of the broker and the gateway."""
    return memory_mib([p.pid for p in home.processes() if p.role in ("broker", "gateway")])


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All levels, after a warm-up at full load."""
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
        start = told([document(Path(folder), options.places, options.queue)])
        async with (
            house(start) as home,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
        ):
            await level(session, home, argparse.Namespace(**{**vars(options), "seconds": 2 * WARM_S}), 1.0)
            begin = memory(home)
            rows = [await level(session, home, options, load) for load in options.levels]
            tables = await home.tables(EMPTY_S)
    goodput = {row["load"]: row["goodput"] for row in rows}
    peak = max(goodput.values())
    return {
        "capacity_per_s": options.places / options.service,
        "levels": rows,
        "goodput_2x_over_peak": goodput[2.0] / peak if 2.0 in goodput else None,
        "p99_admitted_ms": max(row["p99_ms"] for row in rows),
        "bad_refusals": sum(row["bad_refusals"] for row in rows),
        "memory_begin_mib": begin,
        "memory_end_mib": rows[-1]["memory_mib"],
        "left_in_tables": tables,
    }


async def _main(report: Report, options: argparse.Namespace) -> None:
    results = await measure(options)
    shown = [{key: value for key, value in row.items() if key != "statuses"} for row in results["levels"]]
    report.table(f"Loads, as multiples of {results['capacity_per_s']:g} requests/s", shown)
    report.table("Outcome", [{k: v for k, v in results.items() if not isinstance(v, dict | list)}])
    report.finish(results)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench overload", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals, a level")
    parser.add_argument("--levels", type=float, nargs="+", default=list(LEVELS), help="multiples of capacity")
    parser.add_argument("--places", type=int, default=8, help="requests that the stage works on at once")
    parser.add_argument("--service", type=float, default=0.2, help="seconds that each keeps its place")
    parser.add_argument("--queue", type=int, default=16, help="requests that may wait besides")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    if options.seconds < 2 * WARM_S:
        parser.error(f"--seconds: at least {2 * WARM_S:g}")
    return options


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark."""
    uvloop.run(_main(Report("overload", argv, ["aiohttp"]), parse(argv)))
