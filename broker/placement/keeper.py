"""What runs on a Ray node: one `omni-worker`, as a child process of a Ray actor.

Ray looks this class up by name on the node, so the project must be installed there, as `omni-worker` must be.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

from adapters.process import python

REST_S = 1.0  #: the last lines of a worker that has ended come within so long


class Keeper:
    """An actor's body. Its methods run on threads of its own, so one may wait while another is called.

    Args:
        options: The command line of `omni-worker`, without its name.
        keys: The folder of keys where the broker runs. It is used where a node has it and names no other.
    """

    def __init__(self, options: list[str], keys: str) -> None:
        self._options = options
        self._keys = keys
        self._process: subprocess.Popen[str]

    def begin(self) -> tuple[str, int]:
        """Starts the worker; gives this machine's name and the process."""
        environment = dict(os.environ)
        if self._keys and "OMNI_KEYS" not in environment and Path(self._keys).is_dir():
            environment["OMNI_KEYS"] = self._keys
        self._process = subprocess.Popen(
            python("workers.cli", *self._options, "--stop-with-stdin"),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
        )
        return socket.gethostname(), self._process.pid

    def wait(self) -> tuple[int, str]:
        """Passes on what the worker prints until it has ended; gives its exit code and its last line."""
        last: deque[str] = deque(maxlen=1)
        passing = threading.Thread(target=self._pass_on, args=(last,), daemon=True)
        passing.start()
        code = self._process.wait()
        passing.join(REST_S)  # what it has left behind may hold its standard error open
        return code, "".join(last)

    def _pass_on(self, last: deque[str]) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            last.append(line.strip())

    def drain(self) -> None:
        """Tells the worker to finish what it holds and to leave."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
