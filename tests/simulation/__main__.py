"""``scripts/simulate``: thousands of lives of the broker, each with its own mishaps, from one seed each.

A seed that fails prints what went wrong; ``--replay SEED`` runs that one again and prints every message.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter

from tests.simulation.runner import STEPS, run_all
from tests.simulation.world import World

MOST_FAILURES = 20


def simulate(first: int, count: int, steps: int, jobs: int) -> int:
    """Runs the seeds and says how it goes. Returns how many failed."""
    began = told = time.monotonic()
    ends: Counter[str] = Counter()
    worlds = failed = 0
    for result in run_all(first, count, steps=steps, jobs=jobs):
        worlds += result.worlds
        ends.update(result.ends)
        for seed, error in result.failures:
            failed += 1
            option = f" --steps {steps}" if steps != STEPS else ""
            print(f"\rseed {seed}: {error}\n  scripts/simulate --replay {seed}{option}", flush=True)
        now = time.monotonic()
        if now - told > (0.2 if sys.stderr.isatty() else 60.0):
            told = now
            end = "" if sys.stderr.isatty() else "\n"
            line = f"\r{worlds} of {count} seeds, {failed} failed, {now - began:.0f} s"
            print(line, end=end, file=sys.stderr, flush=True)
        if failed >= MOST_FAILURES:
            break
    seconds = time.monotonic() - began
    calls = ", ".join(f"{number} {end}" for end, number in ends.most_common())
    print(f"\r{worlds} seeds in {seconds:.0f} s, {failed} failed; {ends.total()} requests: {calls}")
    return failed


def replay(seed: int, steps: int) -> int:
    """Runs one seed and prints what happens. Returns 1 if it fails."""
    world = World(seed, print)
    try:
        world.run(steps)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return 1
    print("all is well")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/simulate", description="Random lives of the broker's core."
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first one (default: 0)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of random life in each (default: {STEPS})")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)"
    )
    parser.add_argument("--replay", type=int, metavar="SEED", help="run this one and print every message")
    options = parser.parse_args()
    if options.replay is not None:
        return replay(options.replay, options.steps)
    return 1 if simulate(options.first, options.seeds, options.steps, options.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
