"""What does not end by itself: attempts over their time limit, and work that a stop would wait for."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.client import BrokerError, Client
from tests.house import House, line, module, write
from tests.leftovers import until
from workers.guardian import DRAIN_S

Houses = Callable[..., House]

GIVEN = {"request": [{"text": "x"}]}
HANG = {"a": {"hang": True}}


async def hang(client: Client) -> None:
    async with await client.submit("line", outputs=["text"], given=GIVEN, params=HANG) as stream:
        async for _ in stream:
            pass


def running(home: House) -> bool:
    return bool(home.stage("line", "a")["running"])


async def test_an_attempt_over_its_time_limit_ends_with_its_engine(house: Houses, tmp_path: Path) -> None:
    document: dict[str, Any] = line("a")
    document["stages"]["a"]["retry"] = {"attempts": 1, "timeout_s": 1}
    home = house("--pipeline", write(tmp_path, document))
    (before,) = home.pids("line", "a")
    async with home.client() as client:
        with pytest.raises(BrokerError, match="time limit of 1 s"):
            await asyncio.wait_for(hang(client), 60)
    await asyncio.to_thread(home.until, lambda: home.pids("line", "a") not in (set(), {before}))


async def test_a_second_interrupt_waits_for_no_work(house: Houses, tmp_path: Path) -> None:
    home = house("--pipeline", write(tmp_path, line("a")))
    async with home.client() as client:
        task = asyncio.create_task(hang(client))
        await asyncio.to_thread(home.until, lambda: running(home))
        assert home.process is not None
        home.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(home.until, lambda: "workers finish what they hold" in home.log)
        home.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(home.process.wait, DRAIN_S - 10) == 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    home.forget()  # the request would go on with the next start


async def test_a_second_signal_ends_a_single_worker_at_once(house: Houses, tmp_path: Path) -> None:
    home = house("--pipeline", write(tmp_path, line("a")), "--stage", "a.replicas=0", ready=False)
    worker = home.worker("a")
    await asyncio.to_thread(home.until, home.is_ready)
    async with home.client() as client:
        task = asyncio.create_task(hang(client))
        await asyncio.to_thread(home.until, lambda: running(home))
        worker.send_signal(signal.SIGTERM)
        draining = lambda: home.stage("line", "a")["workers"][0]["draining"]  # noqa: E731
        await asyncio.to_thread(home.until, draining)
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait, DRAIN_S - 10) == 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_that_waits_for_a_broker_leaves_at_the_first_signal(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = module("workers.cli", "--stage", "a", "--patience", "600", "--broker", f"ipc://{tmp_path}")
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: listens(worker.pid), "the worker to listen for signals", 60)
        worker.send_signal(number)
        _, said = worker.communicate(timeout=60)
    finally:
        worker.kill()
    assert worker.returncode == 0
    assert "Traceback" not in said


def listens(pid: int) -> bool:
    """Whether the process has a handler for SIGTERM (SigCgt in proc(5)), and waits.

    It begins with SIGTERM, and Python has a handler of its own for SIGINT: it is through when it waits.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1) and "State:\tS" in status


def test_a_worker_refuses_a_bad_log_level_without_a_traceback() -> None:
    command = module("workers.cli", "--stage", "a", "--log-level", "loud")
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "DEBUG" in result.stderr
    assert "Traceback" not in result.stderr
