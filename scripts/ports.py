"""Ports for what the tests and the benches start."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_FIRST = 10_000
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(count: int = 1) -> int:
    """The first of so many ports in a row that nobody listens on, and that nobody else was told of lately.

    Who is told a port listens on it only a while later. Callers in all processes therefore take the ports in
    turn, by a counter in a file of the user's, or two would now and then be told the same one. The ports lie
    below those that the kernel gives to outgoing connections, which might take one of these in that while.

    Raises:
        RuntimeError: All are taken.
    """
    end = max(int(_GIVEN.read_text().split()[0]) if _GIVEN.exists() else 32_768, 2 * _FIRST)
    counter = Path(tempfile.gettempdir()) / f"omni-ports-{os.getuid()}"
    with open(os.open(counter, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        said = file.read()
        port = int(said) if said.isdecimal() else random.randrange(_FIRST, end)
        for _ in range(_FIRST, end):
            if not _FIRST <= port <= end - count:
                port = _FIRST
            if all(_is_free(port + number) for number in range(count)):
                file.seek(0)
                file.truncate()
                file.write(str(port + count))
                return port
            port += 1
    raise RuntimeError(f"no {count} free ports in a row from {_FIRST} to {end}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
