"""Children that are kept alive come back whatever they print, leave behind, or are short of."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from broker.child import Child


async def starts(command: list[str], told: Callable[[list[str]], bool]) -> list[str]:
    """What a child says until it has said enough."""
    lines: list[str] = []
    child = Child("it", command, lines.append)
    child.start()
    try:
        async with asyncio.timeout(30):
            while not told(lines):
                await asyncio.sleep(0.02)
    finally:
        child.kill()
        await child.stop(10)
    return lines


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def test_a_line_without_end() -> None:
    code = "import sys; sys.stderr.write('x' * 200_000 + '\\r' + 'y' * 200_000); sys.exit(3)"
    lines = await starts(python(code), lambda said: sum("it ended" in line for line in said) > 1)
    printed = "".join(lines[: next(i for i, line in enumerate(lines) if "it ended" in line)])
    assert printed.count("x") == printed.count("y") == 200_000


def alive(pid: str) -> bool:
    try:
        return ") Z " not in Path("/proc", pid, "stat").read_text()
    except OSError:
        return False


async def test_a_grandchild_that_holds_the_log_open() -> None:
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '300']).pid, file=sys.stderr); exit(3)"
    lines = await starts(python(code), lambda said: sum("it ended" in line for line in said) > 1)
    assert not [line for line in lines if line.isdigit() and alive(line)]


async def test_no_process_can_be_made() -> None:
    lines = await starts(["/nowhere/at/all"], lambda said: len(said) > 1)
    assert all("it could not be started" in line for line in lines)
