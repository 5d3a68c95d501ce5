"""More connections than a shell lets a process open."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.house import House, line, write

Houses = Callable[..., House]

SOFT = 128  #: files that the shell lets `omni-broker start` open
CALLERS = 300


def test_a_low_limit_of_open_files_does_not_make_the_gateway_deaf(house: Houses, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, hard))
    try:
        home = house("--pipeline", write(tmp_path, line("a")), "--no-workers", ready=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    home.until(lambda: home.get("/health")[0] == 200)
    with ExitStack() as stack:
        for _ in range(CALLERS):
            stack.enter_context(socket.create_connection(("127.0.0.1", home.port), timeout=60))
        assert home.get("/health")[0] == 200
