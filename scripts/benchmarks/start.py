"""How long `omni-broker start` takes until /health answers, and until every stage has a worker."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from scripts.benchmarks.common import Report, quantile
from scripts.benchmarks.house import house, told


async def _main(report: Report, options: argparse.Namespace) -> None:
    rows = []
    for _ in range(options.times):
        async with house(told([options.pipeline])) as home:
            rows.append({"health_s": home.health_s, "ready_s": home.ready_s})
    report.table(f"`omni-broker start --pipeline {options.pipeline}`, seconds", rows)
    health, ready = ([row[name] for row in rows] for name in ("health_s", "ready_s"))
    report.finish(
        {
            "health_best_s": min(health),
            "health_p50_s": quantile(health, 0.5),
            "ready_p50_s": quantile(ready, 0.5),
        }
    )


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="scripts/bench start", description=__doc__)
    parser.add_argument("--pipeline", default="echo")
    parser.add_argument("--times", type=int, default=5)
    asyncio.run(_main(Report("start", argv, ["aiohttp"]), parser.parse_args(argv)))
