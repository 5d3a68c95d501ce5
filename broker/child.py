"""A child process that is kept alive: started again when it dies, ended when it is told to."""

from __future__ import annotations

import asyncio
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from subprocess import SubprocessError

from adapters.process import describe_exit, dies_with_parent, end_group, ended, send_signal

LONGEST_PAUSE_S = 2.0  #: between two starts of a process that keeps dying
SETTLED_S = 10.0  #: a process that lived so long is started again at once
REST_S = 1.0  #: the last lines of one that has ended come within so long
LONGEST_LINE = 65_536  #: bytes; more without a line break, as bars of progress have, comes in pieces


class Child:
    """One process that is kept alive.

    Args:
        name: What log lines call it.
        command: Its command line.
        say: Gets each line that it prints.
        hopeless: Told each exit code; whether there is no use in another start.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        say: Callable[[str], None],
        hopeless: Callable[[int], bool] = lambda code: False,
    ) -> None:
        self.name = name
        self._command = command
        self._say = say
        self._hopeless = hopeless
        self._process: Process | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts it, and again whenever it dies, after a pause that grows while it keeps dying."""
        self._task = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        pause = 0.0
        while not self._stopping:
            began = time.monotonic()
            try:
                code = await self._run_once()
            except (OSError, SubprocessError) as error:  # no memory, no process, no file is left for it
                what = f"could not be started ({error})"
            else:
                if self._stopping or self._hopeless(code):
                    return
                what = f"ended ({describe_exit(code)})"
            lived = time.monotonic() - began
            pause = 0.0 if lived > SETTLED_S else min(max(0.1, pause * 2), LONGEST_PAUSE_S)
            when = f"in {pause:g} s" if pause else "now"
            self._say(f"{self.name} {what}; it is started again {when}")
            await asyncio.sleep(pause)

    async def _run_once(self) -> int:
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=DEVNULL, stderr=PIPE, preexec_fn=dies_with_parent(new_group=True)
        )
        if self._stopping:  # stop() came while it was being made
            send_signal(process, signal.SIGTERM)
        assert process.stderr is not None
        listening = asyncio.ensure_future(self._listen(process.stderr))
        try:
            code = await ended(process)
            end_group(process.pid)
            await asyncio.wait((listening,), timeout=REST_S)
        finally:
            listening.cancel()
        return code

    async def _listen(self, pipe: asyncio.StreamReader) -> None:
        """Passes on what it prints, until nobody can print there any more."""
        rest = b""
        while piece := await pipe.read(LONGEST_LINE):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) >= LONGEST_LINE:
                lines.append(rest)
                rest = b""
            for line in lines:
                self._say(line.decode(errors="replace").rstrip())
        if rest:
            self._say(rest.decode(errors="replace").rstrip())

    async def stop(self, patience_s: float) -> None:
        """SIGTERM; SIGKILL to all its group after so long."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            send_signal(process, signal.SIGTERM)
        if self._task is None:
            return
        if self._process is None or (process is not None and process.returncode is not None):
            if process is not None:
                end_group(process.pid)
            self._task.cancel()  # it waits before the next start
        done, _ = await asyncio.wait((self._task,), timeout=patience_s)
        if not done and self._process is not None:
            self._say(f"{self.name} did not leave within {patience_s:g} s; it is killed")
            self.kill()
            await asyncio.wait((self._task,), timeout=5.0)

    @property
    def pid(self) -> int:
        """Of its process now, or of its last one; 0 before the first."""
        return self._process.pid if self._process is not None else 0

    def kill(self) -> None:
        """SIGKILL, now, with all that it started; it is not started again."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            end_group(self._process.pid)
