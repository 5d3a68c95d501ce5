"""What all benchmarks print: machine, versions and command first, then tables, and JSON in the last line."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def machine() -> str:
    """CPU, cores we may use, memory, kernel, in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{_cpu()}, {cores} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Python's version, and those of the given distributions ("absent" where not installed)."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


class Report:
    """The output of one benchmark run.

    report = Report("payload", argv, packages=["numpy"])
    report.table("Milliseconds", rows)
    report.finish({"rows": rows})
    """

    def __init__(self, name: str, argv: Sequence[str], packages: Iterable[str] = ()) -> None:
        self._head: dict[str, Any] = {
            "benchmark": name,
            "machine": machine(),
            "versions": versions(["numpy", "pyzmq", "msgspec", *packages]),
            "command": shlex.join(["scripts/bench", name, *argv]),
        }
        console.print(self._head["command"], style="bold")
        console.print(self._head["machine"])
        console.print(", ".join(f"{key} {value}" for key, value in self._head["versions"].items()))

    def say(self, text: str) -> None:
        """A line of progress or explanation."""
        console.print(text)

    def table(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of equal keys as a table; numbers with four significant digits."""
        table = Table(title=title, title_justify="left")
        for key in rows[0]:
            table.add_column(key, justify="right")
        for row in rows:
            table.add_row(*(_cell(value) for value in row.values()))
        console.print(table)

    def finish(self, results: Mapping[str, Any]) -> None:
        """The last line of the output: everything as JSON, on one line."""
        print(json.dumps(self._head | dict(results)), flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0..1), linear between neighbours."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * q
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def median_ms(times: Iterable[float]) -> float:
    """The median of times in seconds, in milliseconds."""
    return statistics.median(times) * 1e3


def timed(clock: Callable[[], float], action: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = clock()
    action()
    return clock() - start
