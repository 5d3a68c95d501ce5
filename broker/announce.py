"""Says which stages are still loading, and once that everything is ready."""

from __future__ import annotations

import time
from collections.abc import Callable

from broker.asking import Asker

ASK_EVERY_S = 0.5
TELL_EVERY_S = 15.0


async def announce(address: str, stages: set[str], where: str, say: Callable[[str], None]) -> None:
    """Asks the broker until all stages have a worker, and says so; on the way, what is missing.

    Args:
        address: The broker's.
        stages: Those that workers are kept for, as "pipeline/stage"; others are not waited for.
        where: What is told at the end, the place to go to.
        say: Gets each line.
    """
    asker = Asker(address, "supervisor", "ready")
    began = told = time.monotonic()
    try:
        while True:
            report = await asker.ask(ASK_EVERY_S)
            if report is None:
                continue
            waits_for = set(report["missing"]) & stages
            if not waits_for:
                say(f"ready after {time.monotonic() - began:.0f} s{where}")
                return
            if time.monotonic() - told > TELL_EVERY_S:
                told = time.monotonic()
                say(f"loading {', '.join(sorted(waits_for))} ({told - began:.0f} s)")
    finally:
        asker.close()
