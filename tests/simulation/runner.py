"""Runs many worlds, on several processes."""

from __future__ import annotations

import multiprocessing
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tests.simulation.world import World

STEPS = 400  #: of random life in each world
SLICE = 10  #: worlds that a process gets at once


class Result(NamedTuple):
    """How some worlds went."""

    worlds: int
    ends: Counter[str]  #: how their calls ended -> how many
    failures: list[tuple[int, str]]  #: (seed, what went wrong)


def run_slice(first: int, count: int, steps: int) -> Result:
    """Runs the worlds of ``count`` seeds one after the other."""
    ends: Counter[str] = Counter()
    failures = []
    for seed in range(first, first + count):
        world = World(seed)
        try:
            world.run(steps)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
            failures.append((seed, f"{type(error).__name__}: {error} ({place})"))
        ends.update(call.status or "given up" for call in world.calls.values())
    return Result(count, ends, failures)


def run_all(first: int, count: int, *, steps: int = STEPS, jobs: int = 1) -> Iterator[Result]:
    """Runs the worlds of the seeds from ``first`` on; gives results as they come, in no order."""
    slices = [
        (start, min(SLICE, first + count - start), steps) for start in range(first, first + count, SLICE)
    ]
    # Forked: a spawned pool leaves a process of its own behind, multiprocessing's resource tracker.
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(_run, slices)
        pool.close()
        pool.join()


def _run(one: tuple[int, int, int]) -> Result:
    return run_slice(*one)
