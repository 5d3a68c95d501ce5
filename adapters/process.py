"""Starting child processes that can't outlive us."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress

LOOK_S = 1.0  #: an end is noticed within so long where others hold the process's pipes

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: a forked child must not import anything


def dies_with_parent(*, new_group: bool = False) -> Callable[[], None]:
    """A ``preexec_fn``: the child gets SIGKILL when the thread that started it ends (prctl(2)).

    Args:
        new_group: The child leads a process group of its own, so that its children can be ended with it.

    For processes with one thread that forks and lives as long as they do, as guardians and supervisors have.
    """
    parent = os.getpid()

    def prepare() -> None:
        if new_group:
            os.setpgid(0, 0)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the prctl
            os._exit(1)

    return prepare


def leave_with_stdin() -> None:
    """From now on this process gets SIGTERM when its standard input ends.

    For a parent that may die without a word, and can't use :func:`dies_with_parent`: the kernel closes its
    end of the pipe.
    """

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def python(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of ours; ``-P``: never from the current folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


def send_signal(process: Process, number: signal.Signals) -> None:
    """Sends a signal to a child, unless it is gone already.

    Not by the process's own method, which first looks whether it has died, and so may take its exit code away
    from asyncio: of one that is just dying, "exit code 255" would be told then.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


async def ended(process: Process) -> int:
    """Its exit code, when it has ended.

    ``process.wait()`` may last until its pipes are closed as well, which its children may hold open; and they
    end only when somebody ends them because of its death.
    """
    waiting = asyncio.ensure_future(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait((waiting,), timeout=LOOK_S)
    finally:
        waiting.cancel()
    return process.returncode


def describe_exit(code: int) -> str:
    """A return code as asyncio and subprocess give it, in words: "exit code 3", "signal SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def end_group(leader: int) -> None:
    """Kills what is left of a child's process group. The leader must not have been reaped and reused."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
