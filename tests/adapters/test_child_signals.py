"""A child's end is told as it was."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from adapters.process import send_signal

TIMES = 30


async def test_a_child_that_is_killed_again_while_it_dies_is_told_to_have_been_killed() -> None:
    """Whoever looks whether it lives must not take its exit code away from the one who waits for it."""
    codes = []
    for _ in range(TIMES):
        process = await asyncio.create_subprocess_exec("sleep", "60")
        while is_there(process.pid):
            send_signal(process, signal.SIGKILL)
        codes.append(await process.wait())
    assert codes == [-signal.SIGKILL] * TIMES


def is_there(pid: int) -> bool:
    """Whether there is such a process, be it dead and not yet waited for."""
    return Path(f"/proc/{pid}").exists()
