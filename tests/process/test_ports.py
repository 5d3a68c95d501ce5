"""The gateway's port, and those of the tests themselves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import chain

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
    code = "import broker.supervisor as s, broker.cli as c; s.FRONT_S = 3600.0; c.main()"
    home = house()
    command = [sys.executable, "-P", "-c", code, "start", "--pipeline", "echo", "--port", "0"]
    home.process = subprocess.Popen(command, env=home.env, stderr=subprocess.DEVNULL)
    home.until(lambda: "workers.cli" in " ".join(home.processes().values()))


def test_processes_that_ask_for_ports_at_the_same_time_are_told_different_ones() -> None:
    """Two test files run at once: one was answered by the other's gateway, in one run of a hundred."""
    ask = "from scripts.ports import free_port; print(*[free_port(2) for _ in range(300)])"
    processes = [subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE) for _ in range(3)]
    told = [int(port) for port in chain(*(process.communicate()[0].split() for process in processes))]
    assert len(told) == 900
    assert len({*told, *(port + 1 for port in told)}) == 1800
