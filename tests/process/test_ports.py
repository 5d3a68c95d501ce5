"""The gateway's port."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

from tests.house import House

Houses = Callable[..., House]


def urls(home: House) -> list[str]:
    return re.findall(r"listening on (\S+)", home.log)


def test_a_free_port_is_kept_when_the_gateway_is_replaced(house: Houses) -> None:
    home = house("--pipeline", "echo", "--no-workers", "--port", "0", ready=False)
    home.until(lambda: urls(home))
    os.kill(home.process_of("broker.gateway"), signal.SIGKILL)
    home.until(lambda: len(urls(home)) == 2)
    first, second = urls(home)
    assert first == second


def test_workers_do_not_wait_for_a_port_that_nobody_chose(house: Houses) -> None:
    home = house("--pipeline", "echo", "--port", "0", ready=False)
    home.until(lambda: urls(home))
    began = time.monotonic()
    home.until(lambda: "workers.cli" in " ".join(home.processes().values()))
    assert time.monotonic() - began < 4.0  # they start by themselves after 5 s
