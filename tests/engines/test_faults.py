"""Faults on demand do what they say, where and as often as they say."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from adapters.chunk import Payload
from tests.engines.helpers import collect, job, stage, until
from workers.engine import ItemError
from workers.engines.faults import hold_gil
from workers.engines.function import FunctionEngine

WORDS: list[Payload] = [{"text": "one"}, {"text": "two"}, {"text": "three"}]


def engine(op: str = "pass") -> FunctionEngine:
    return FunctionEngine(stage("function", options={"op": op}), device="cpu")


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"sleep_s": "long"}, "sleep_s"),
        ({"sleep_s": -1}, "sleep_s"),
        ({"raise": 5}, "raise"),
        ({"hang": "yes"}, "hang"),
        ({"exit": 256}, "exit"),
        ({"nan": 1}, "nan"),
        ({"at": -1}, "at"),
        ({"at": 1.5}, "at"),
        ({"attempts": 0}, "attempts"),
        ({"chunk_sleep_s": None}, "chunk_sleep_s"),
        ({"hold_gil_s": 1e9}, "hold_gil_s"),
    ],
)
async def test_a_fault_of_wrong_type_is_refused_by_name(params: Payload, name: str) -> None:
    with pytest.raises(ItemError, match=name) as caught:
        await collect(engine(), job(*WORDS, **params))
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize("at", [0, 2])
async def test_it_raises_at_the_chunk_it_was_told(at: int) -> None:
    given: list[Payload] = []
    with pytest.raises(ItemError, match=f"boo.*chunk {at}") as caught:
        await collect(engine(), job(*WORDS, **{"raise": "boo", "at": at}), given)
    assert given == WORDS[:at]
    assert caught.value.status == 500


async def test_it_stops_raising_after_so_many_attempts() -> None:
    params = {"raise": True, "attempts": 2}
    for attempt in (1, 2):
        with pytest.raises(ItemError):
            await collect(engine(), job(*WORDS, attempt=attempt, **params))
    assert await collect(engine(), job(*WORDS, attempt=3, **params)) == WORDS


async def test_it_hangs_until_it_is_cancelled() -> None:
    given: list[Payload] = []
    task = asyncio.create_task(collect(engine(), job(*WORDS, hang=True, at=1), given))
    await until(lambda: bool(given))
    assert not (await asyncio.wait([task], timeout=0.05))[0]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert given == WORDS[:1]


@pytest.mark.parametrize(("code", "status"), [("7", 7), ("True", 1), ("0", 0)])
def test_it_ends_the_process_with_the_code_it_was_told(code: str, status: int) -> None:
    script = (
        "import asyncio\n"
        "from tests.engines.test_faults import WORDS, collect, engine, job\n"
        f"asyncio.run(collect(engine(), job(*WORDS, exit={code})))\n"
        "raise SystemExit(99)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=300, check=False).returncode == status


def test_a_held_gil_lets_no_other_thread_run() -> None:
    times: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            times.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        while len(times) < 3:
            time.sleep(0.001)
        hold_gil(0.3)
    finally:
        stop.set()
        thread.join()
    gaps = [after - before for before, after in zip(times, [*times[1:], time.monotonic()], strict=True)]
    assert max(gaps) >= 0.29


async def test_pauses_come_before_each_chunk_or_before_one() -> None:
    for params, least in (({"chunk_sleep_s": 0.03}, 0.09), ({"sleep_s": 0.05, "at": 2}, 0.05)):
        start = time.monotonic()
        assert await collect(engine(), job(*WORDS, **params)) == WORDS
        assert time.monotonic() - start >= least


async def test_nan_goes_into_the_tensor_of_one_chunk() -> None:
    tones = await collect(engine("tone"), job(*WORDS, nan=True, at=1))
    assert [bool(np.isnan(tone["audio"]).any()) for tone in tones] == [False, True, False]
    words = await collect(engine(), job(*WORDS, nan=True))
    assert np.isnan(words[0]["nan"])
    assert WORDS[0] == {"text": "one"}  # the input itself stays as it is
