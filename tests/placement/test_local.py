"""Workers of a stage come and go with its queue, as real processes, and nothing is lost on the way."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from broker.client import Client
from tests.house import House, line, write
from tests.leftovers import until

Houses = Callable[..., House]

QUICK = {"queue_per_worker": 1, "up_s": 0.5, "down_s": 1, "cooldown_s": 0.5}
CALLERS = 12


def scaled(least: int, most: int) -> dict[str, Any]:
    """A stage `a` that works on one task at a time, for 0.2 s each."""
    document = line("a")
    document["stages"]["a"] = {
        "engine": "function",
        "options": {"op": "pass", "delay_s": 0.2},
        "batch": {"max_num_seqs": 1},
        "resources": {"replicas": {"min": least, "max": most}, "scaling": QUICK},
    }
    return document


async def ask(client: Client, number: int) -> bool:
    """Whether a request is answered with its own words."""
    given = {"request": [{"text": f"{number}"}]}
    async with await client.submit("line", outputs=["text"], given=given) as stream:
        return [payload["text"] async for _, payload in stream] == [f"{number}"]


async def feed(client: Client, numbers: Iterator[int], enough: asyncio.Event) -> bool:
    """One caller of several, who asks again and again; whether all was answered."""
    answered = True
    while not enough.is_set():
        answered = await ask(client, next(numbers)) and answered
    return answered


def told(home: House) -> dict[str, Any]:
    replicas: dict[str, Any] = home.stage("line", "a")["replicas"]
    return replicas


def has_grown(home: House) -> bool:
    """Whether there are as many as can be, because of the queue: if its callers pause, it shrinks again."""
    replicas = told(home)
    return replicas["present"] == 3 and "queued for" in replicas["why"]


def guardians(home: House) -> int:
    return sum("workers.cli" in command.split() for command in home.processes().values())


async def test_workers_follow_the_queue_and_leave_under_load(house: Houses, tmp_path: Path) -> None:
    home = house("--pipeline", write(tmp_path, scaled(1, 3)))
    assert told(home)["wanted"] == 1
    async with home.client() as client:
        numbers, enough = itertools.count(), asyncio.Event()
        callers = [asyncio.create_task(feed(client, numbers, enough)) for _ in range(CALLERS)]
        await asyncio.to_thread(home.until, lambda: has_grown(home))
        table = await asyncio.to_thread(home.command, "status")
        assert "Scaling" in table.stdout
        enough.set()
        assert all(await asyncio.gather(*callers))
        while guardians(home) > 1:  # one request after the other, so two are idle and leave
            assert await ask(client, next(numbers))
    assert told(home)["wanted"] == 1
    assert "busy" in told(home)["why"]
    tasks, asked = home.stage("line", "a")["tasks"], next(numbers)
    assert (tasks["attempts"], tasks["done"]) == (asked, asked)
    assert (tasks["deaths"], tasks["redelivered"]) == (0, 0)
    assert "is started again" not in home.log


async def test_the_first_task_of_a_stage_that_rests_wakes_it(house: Houses, tmp_path: Path) -> None:
    home = house("--pipeline", write(tmp_path, scaled(0, 1)))  # it is ready, for what waits gets its worker
    assert guardians(home) == 0
    async with home.client() as client:
        assert await ask(client, 1)
        await asyncio.to_thread(home.until, lambda: guardians(home) == 0)
        assert await ask(client, 2)


async def test_a_health_file_says_how_a_worker_is(house: Houses, tmp_path: Path) -> None:
    home = house("--pipeline", write(tmp_path, line("a")), "--no-workers", ready=False)
    home.until((home.run_dir / "workers.sock").exists)
    file = tmp_path / "health" / "file"
    process = home.worker("a", "--health-file", str(file), "--drain-s", "6")

    def says(word: str) -> None:
        until(lambda: file.is_file() and file.read_text() == f"{word}\n", f"the file to say {word}", 60.0)

    says("ready")
    broker = home.process_of("broker.server")
    os.kill(broker, signal.SIGSTOP)
    says("no-broker")
    os.kill(broker, signal.SIGCONT)
    says("ready")
    async with home.client() as client:
        hang = {"a": {"hang": True}}
        stream = await client.submit(
            "line", outputs=["text"], given={"request": [{"text": "x"}]}, params=hang
        )
        await asyncio.to_thread(home.until, lambda: home.stage("line", "a")["running"] == 1)
        process.terminate()
        says("draining")
        assert await asyncio.to_thread(process.wait, 20) == 0  # --drain-s, where 30 s are usual
        assert not file.exists()
        stream.abort()
