"""Workers that are killed, leave or join while they have work."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.client import BrokerError, Client
from tests.house import House, empty_house, line, write

Houses = Callable[..., House]

ROOT = Path(__file__).parents[2]
HELD_S = 6.5  #: a guardian that is silent for 6 s is given up
AGAIN = {"hang": True, "at": 2, "attempts": 1}  #: two chunks, and the rest only from another engine
PAYLOADS = [{"text": f"{number} "} for number in range(8)]


@pytest.fixture(scope="module")
def _lined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with empty_house() as home:
        home.start("--pipeline", write(tmp_path_factory.mktemp("line"), line("a", "b")))
        yield home


@pytest.fixture
def lined(_lined: House, monkeypatch: pytest.MonkeyPatch, leaves_nothing: Path) -> House:
    """A house with the pipeline `line` of the stages `a` and `b`, for those whose deaths it gets over."""
    monkeypatch.setenv("OMNI_SHM_DIR", str(_lined.shm_dir))
    _lined.until(_lined.is_ready)
    return _lined


def deaths(home: House) -> int:
    """Of tasks of the stage `a`, so far."""
    count: int = home.stage("line", "a")["tasks"]["deaths"]
    return count


async def run(client: Client, **params: Any) -> tuple[list[str], int]:
    """One request through `line`'s stage `a`; gives its texts and the attempts that stage needed."""
    given = {"request": PAYLOADS}
    async with await client.submit("line", outputs=["text"], given=given, params={"a": params}) as stream:
        texts = [payload["text"] async for _, payload in stream]
    return texts, next(timing.attempts for timing in stream.timings if timing.stage == "a")


WHOLE = [payload["text"] for payload in PAYLOADS]


async def until(house: House, condition: Callable[[], Any], timeout_s: float = 60.0) -> float:
    return await asyncio.to_thread(house.until, condition, timeout_s)


async def test_a_killed_engine_is_replaced_and_its_tasks_run_again(lined: House) -> None:
    home = lined
    before, chunks = deaths(home), home.stage("line", "a")["chunks"]
    async with home.client() as client:
        tasks = [asyncio.create_task(run(client, **AGAIN)) for _ in range(4)]
        await until(home, lambda: home.stage("line", "a")["chunks"] >= chunks + 8)
        (pid,) = home.pids("line", "a")
        os.kill(pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks)
    assert [texts for texts, _ in results] == [WHOLE] * 4
    assert all(attempts == 2 for _, attempts in results)
    (replacement,) = home.pids("line", "a")
    assert replacement != pid
    assert deaths(home) == before + 4
    # Its guardian has seen it, which is at once, and told the broker; nobody had to wait for a silence.
    await until(home, lambda: f"a's engine {pid} died (signal SIGKILL)" in home.log)
    await until(home, lambda: f"line/a: worker {pid} died (signal SIGKILL) with 4 tasks" in home.log)


async def test_a_second_worker_joins_gets_work_and_leaves_without_loss(house: Houses, tmp_path: Path) -> None:
    home = house("--pipeline", write(tmp_path, line("a")), "--stage", "a.max_num_seqs=2")
    (first,) = home.pids("line", "a")
    async with home.client() as client:
        enough = asyncio.Event()

        async def keep_asking() -> list[tuple[list[str], int]]:
            answers = []
            while not enough.is_set():
                answers.append(await run(client, chunk_sleep_s=0.2))
            return answers

        tasks = [asyncio.create_task(keep_asking()) for _ in range(4)]
        worker = home.worker("a")

        def joined() -> bool:
            return any(w["pid"] != first and w["running"] for w in home.stage("line", "a")["workers"])

        await until(home, joined)
        worker.send_signal(signal.SIGTERM)
        enough.set()
        results = [result for each in await asyncio.gather(*tasks) for result in each]
    assert await asyncio.to_thread(worker.wait, 60) == 0
    assert results == [(WHOLE, 1)] * len(results)
    await until(home, lambda: home.pids("line", "a") == {first})
    counts = home.stage("line", "a")["tasks"]
    assert (counts["done"], counts["attempts"], counts["deaths"]) == (len(results), len(results), 0)


async def test_a_killed_guardian_takes_its_engine_along_and_is_replaced(lined: House) -> None:
    home, chunks = lined, lined.stage("line", "a")["chunks"]
    async with home.client() as client:
        task = asyncio.create_task(run(client, **AGAIN))
        await until(home, lambda: home.stage("line", "a")["chunks"] >= chunks + 2)
        (worker,) = home.stage("line", "a")["workers"]
        os.kill(worker["guardian"], signal.SIGKILL)
        await until(home, lambda: worker["pid"] not in home.processes())
        assert await task == (WHOLE, 2)
    (other,) = home.stage("line", "a")["workers"]
    assert other["guardian"] != worker["guardian"]


async def test_an_item_that_kills_its_workers_fails_alone(lined: House) -> None:
    home = lined
    async with home.client() as client:
        mates = [asyncio.create_task(run(client, chunk_sleep_s=0.1)) for _ in range(3)]
        await until(home, lambda: home.stage("line", "a")["running"] == 3)
        with pytest.raises(BrokerError) as caught:
            await run(client, exit=7, at=1)
        assert [texts for texts, _ in await asyncio.gather(*mates)] == [WHOLE] * 3
        assert await client.letters("drop", "all") == {"dropped": 1}
    error = caught.value.error
    assert (error.type, error.stage) == ("worker_died", "a")
    # Three are its fault. One may have given a chunk before, another have had mates that had given none.
    assert 3 <= error.attempts <= 5
    assert "exit code 7" in error.message


async def test_an_engine_that_holds_the_interpreter_is_not_taken_for_dead(lined: House) -> None:
    before = deaths(lined)
    async with lined.client() as client:
        begin = time.monotonic()
        assert await run(client, hold_gil_s=HELD_S) == (WHOLE, 1)
        assert time.monotonic() - begin > HELD_S
    assert deaths(lined) == before


def test_an_engine_that_cannot_load_backs_off_and_says_why(house: Houses, tmp_path: Path) -> None:
    (tmp_path / "broken_engine.py").write_text(
        "class Broken:\n"
        "    resumes = False\n"
        "    def __init__(self, stage, *, device): pass\n"
        "    async def start(self): raise RuntimeError('the weights are missing')\n"
    )
    document = line("a")
    document["stages"]["a"] = {"engine": "broken_engine:Broken"}
    home = house("--pipeline", write(tmp_path, document), ready=False, env={"PYTHONPATH": str(tmp_path)})
    for pause in ("0.1", "0.2", "0.4"):
        says = f"it said last: RuntimeError: the weights are missing; another starts in {pause} s"
        home.until(lambda says=says: says in home.log)  # type: ignore[misc]
    home.until(lambda: b"line/a" in home.get("/ready")[1])
    assert home.get("/ready")[0] == 503
    assert home.status()["missing"] == ["line/a"]


def test_a_worker_for_an_unknown_stage_is_refused_with_the_names(lined: House) -> None:
    worker = lined.worker("c")
    assert worker.wait(60) == 2
    lined.until(lambda: "omni-worker:" in lined.log)
    (message,) = [text for text in lined.log.splitlines() if "omni-worker:" in text]
    assert "'c'" in message
    assert "a, b" in message.split("'c'")[1]


async def test_an_engine_whose_child_holds_its_log_open_is_replaced_and_the_child_ended(
    house: Houses, tmp_path: Path
) -> None:
    """A model server that its engine has started, say."""
    document = line("a")
    document["stages"]["a"] = {"engine": "tests.process.leaving_engine:LeavingEngine"}
    home = house(env={"PYTHONPATH": str(ROOT)})
    home.start("--pipeline", write(tmp_path, document))
    async with home.client() as client, asyncio.timeout(60):
        assert await run(client) == (["done"], 2)
    await until(home, lambda: not [command for command in home.processes().values() if "sleep" in command])
