"""The batching base: bad items fail alone, cancelled ones leave, unequal ones don't meet."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import weakref
import zlib
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from adapters.chunk import Payload
from tests.engines.helpers import collect, job, stage, started, until
from workers.batching import BatchingEngine
from workers.engine import ItemError, Job

Array = NDArray[np.float32]
BAD = np.float32(-1)


class Doubler(BatchingEngine[Array, Array]):
    """Doubles arrays, in batches of equal shape only; one that begins with BAD spoils its batch."""

    def __init__(self, *, size: int = 8, wait_ms: float = 0.0) -> None:
        batch = {"max_batch_size": size, "wait_ms": wait_ms}
        super().__init__(stage("tests:Doubler", batch=batch), device="cpu")
        self.batches: list[int] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def key(self, item: Array) -> Hashable:
        return item.shape

    def forward(self, items: Sequence[Array]) -> list[Array | Exception]:
        self.entered.set()
        self.gate.wait()
        self.batches.append(len(items))
        stacked = np.stack(items)
        if (stacked[:, 0] == BAD).any():
            raise ValueError("a bad item in the batch")
        return list(stacked * 2)

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        async for payload in job.inputs["producer"]:
            yield {"x": await self.submit(payload["x"])}


def item(value: float, length: int = 4) -> Array:
    return np.full(length, value, np.float32)


@asynccontextmanager
async def held(engine: Doubler) -> AsyncIterator[None]:
    """The engine is busy with an item of its own, so that whatever comes meanwhile must queue."""
    engine.gate.clear()
    busy = asyncio.create_task(engine.submit(item(0, 1)))
    await until(engine.entered.is_set)
    try:
        yield
    finally:
        engine.gate.set()
        await asyncio.wait([busy])


async def test_jobs_that_wait_share_a_pass() -> None:
    async with started(Doubler(size=8)) as engine:
        async with held(engine):
            tasks = [asyncio.create_task(engine.submit(item(n))) for n in range(8)]
            await until(lambda: len(engine._waiting) == 8)
        results = await asyncio.gather(*tasks)
    assert engine.batches == [1, 8]
    assert [result[0] for result in results] == [2.0 * n for n in range(8)]


async def test_a_bad_item_fails_alone_and_seven_good_ones_succeed() -> None:
    async with started(Doubler(size=8)) as engine:
        async with held(engine):
            values = [0.0, 1.0, 2.0, BAD, 4.0, 5.0, 6.0, 7.0]
            tasks = [asyncio.create_task(engine.submit(item(value))) for value in values]
            await until(lambda: len(engine._waiting) == 8)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for value, result in zip(values, results, strict=True):
            if value == BAD:
                assert isinstance(result, ValueError)
            else:
                assert np.array_equal(result, item(value * 2))  # type: ignore[arg-type]
        assert np.array_equal(await engine.submit(item(9)), item(18))


async def test_an_error_in_a_results_place_fails_that_item_without_another_pass() -> None:
    class Picky(Doubler):
        def forward(self, items: Sequence[Array]) -> list[Array | Exception]:
            self.batches.append(len(items))
            return [ItemError("no", status=400) if x[0] == BAD else x for x in items]

    async with started(Picky(size=2, wait_ms=10_000)) as engine:
        good, bad = await asyncio.gather(
            engine.submit(item(1)), engine.submit(item(BAD)), return_exceptions=True
        )
    assert np.array_equal(good, item(1))  # type: ignore[arg-type]
    assert isinstance(bad, ItemError)
    assert engine.batches == [2]


async def test_a_model_that_loses_results_fails_its_items_and_lives() -> None:
    class Forgetful(Doubler):
        def forward(self, items: Sequence[Array]) -> list[Array | Exception]:
            return [] if items[0][0] == BAD else list(items)

    async with started(Forgetful()) as engine:
        with pytest.raises(RuntimeError, match="0 results of 1"):
            await engine.submit(item(BAD))
        assert np.array_equal(await engine.submit(item(1)), item(1))


async def test_items_of_unequal_length_are_computed_apart() -> None:
    lengths = [30, 60, 1, 1000, 30, 60, 1, 1000]
    async with started(Doubler()) as engine:
        async with held(engine):
            tasks = [asyncio.create_task(engine.submit(item(n, length))) for n, length in enumerate(lengths)]
            await until(lambda: len(engine._waiting) == len(lengths))
        results = await asyncio.gather(*tasks)
    for n, (length, result) in enumerate(zip(lengths, results, strict=True)):
        assert np.array_equal(result, item(2 * n, length))
    assert engine.batches == [1, 2, 2, 2, 2]


async def test_cancelled_items_leave_before_the_pass_and_normal_load_goes_on() -> None:
    async with started(Doubler(size=8, wait_ms=1)) as engine:
        random.seed(1)

        async def impatient(value: float) -> bool:
            try:
                async with asyncio.timeout(0 if random.random() < 0.8 else None):
                    result = await engine.submit(item(value))
            except TimeoutError:
                return False
            assert np.array_equal(result, item(2 * value))
            return True

        for _ in range(20):
            assert any(await asyncio.gather(*(impatient(n) for n in range(40))))
        assert not engine._waiting
        computed = sum(engine.batches)
        results = await asyncio.gather(*(engine.submit(item(n)) for n in range(100)))
    assert [result[0] for result in results] == [2.0 * n for n in range(100)]
    assert computed < 20 * 40 / 2  # those that had gone cost nothing


async def test_a_job_cancelled_while_it_is_computed_spoils_nothing() -> None:
    async with started(Doubler(size=2, wait_ms=1)) as engine:
        engine.gate.clear()
        gone, stays = (asyncio.create_task(engine.submit(item(n))) for n in (1, 2))
        await until(engine.entered.is_set)
        gone.cancel()
        engine.gate.set()
        assert np.array_equal(await stays, item(4))
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert np.array_equal(await engine.submit(item(3)), item(6))


async def test_a_pass_waits_for_company_no_longer_than_it_was_told() -> None:
    async with started(Doubler(size=2, wait_ms=10_000)) as engine, asyncio.timeout(60):
        for _ in range(10):
            await asyncio.gather(engine.submit(item(1)), engine.submit(item(2)))  # full at once
    async with started(Doubler(size=2, wait_ms=100)) as engine:
        start = time.monotonic()
        await engine.submit(item(3))
        assert time.monotonic() - start >= 0.09
    assert engine.batches == [1]


async def test_a_job_of_many_items_does_not_hold_up_one_of_few() -> None:
    async with started(Doubler(size=1)) as engine:
        order: list[str] = []

        async def work(name: str, items: int) -> None:
            for n in range(items):
                await engine.submit(item(n))
                order.append(name)

        await asyncio.gather(work("long", 20), work("short", 3))
    assert order[:6].count("short") == 3  # they took turns


async def test_the_event_loop_stays_free_while_a_pass_runs() -> None:
    async with started(Doubler()) as engine, held(engine):
        turns = 0
        for _ in range(100):
            await asyncio.sleep(0)
            turns += 1
        assert turns == 100


async def test_batches_in_two_lanes_do_not_wait_for_each_other() -> None:
    class Meeting(BatchingEngine[int, int]):
        lanes = 2

        def forward(self, items: Sequence[int]) -> list[int | Exception]:
            met.wait(30)  # it would break, if one batch came after the other
            return [2 * item for item in items]

        async def run(self, job: Job) -> AsyncIterator[Payload]:
            yield {}

    met = threading.Barrier(2)
    async with started(Meeting(stage("tests:Meeting", batch={"max_batch_size": 1}), device="cpu")) as engine:
        assert await asyncio.gather(*(engine.submit(n) for n in range(6))) == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(("items", "sizes"), [(2, [1, 1]), (5, [2, 3]), (8, [4, 4]), (11, [3, 4, 4])])
async def test_free_lanes_share_what_waits_instead_of_one_taking_all(items: int, sizes: list[int]) -> None:
    class Meeting(BatchingEngine[int, int]):
        lanes = 2

        def forward(self, items: Sequence[int]) -> list[int | Exception]:
            taken.append(len(items))
            if len(taken) <= self.lanes:
                met.wait(30)  # it would break, if one lane had all
            return list(items)

        async def run(self, job: Job) -> AsyncIterator[Payload]:
            yield {}

    taken: list[int] = []
    met = threading.Barrier(2)
    async with started(Meeting(stage("tests:Meeting", batch={"max_batch_size": 4}), device="cpu")) as engine:
        await asyncio.gather(*(engine.submit(n) for n in range(items)))
    assert sorted(taken) == sizes


@pytest.mark.parametrize("lanes", [1, 3])
async def test_every_answer_is_its_own_in_ten_thousand_requests(lanes: int) -> None:
    class Echo(BatchingEngine[bytes, int]):
        def key(self, item: bytes) -> Hashable:
            return len(item) % 3

        def forward(self, items: Sequence[bytes]) -> list[int | Exception]:
            return [zlib.crc32(item) for item in items]

        async def run(self, job: Job) -> AsyncIterator[Payload]:
            async for payload in job.inputs["producer"]:
                yield {"crc": await self.submit(payload["data"])}

    random.seed(2)
    Echo.lanes = lanes
    async with started(Echo(stage("tests:Echo", batch={"max_batch_size": 7}), device="cpu")) as engine:
        left = iter(range(10_000))

        async def caller() -> None:
            for number in left:
                data = random.randbytes(random.randrange(1, 40))
                (answer,) = await collect(engine, job({"data": data}))
                assert answer == {"crc": zlib.crc32(data)}, number

        await asyncio.gather(*(caller() for _ in range(32)))


async def test_stopping_an_engine_ends_its_thread_and_those_that_wait() -> None:
    engine = Doubler()
    await engine.start()
    async with held(engine):
        waiting = asyncio.create_task(engine.submit(item(1)))
        await until(lambda: len(engine._waiting) == 1)
        stopping = asyncio.create_task(engine.stop())
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await stopping
    await until(lambda: not any(thread.name.startswith("forward") for thread in threading.enumerate()))


async def test_an_idle_engine_holds_no_item() -> None:
    """An item may be a view of shared memory, which stays taken for as long as somebody looks at it."""
    async with started(Doubler()) as engine:
        array = item(1.0)
        gone = weakref.ref(array)
        await engine.submit(array)
        del array
        await until(lambda: gone() is None)
