"""Ports for what tests start."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 10_000


def free_port(count: int = 1) -> int:
    """The first of so many ports in a row that nobody listens on.

    They lie below those that the kernel gives to outgoing connections: one of these would sooner or later be
    taken by a connection of something else, between the choice and the moment when somebody listens.
    """
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    end = int(given.read_text().split()[0]) if given.exists() else 32_768
    while True:
        port = random.randrange(_FIRST, max(end, 2 * _FIRST) - count)
        if all(_is_free(port + number) for number in range(count)):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
