"""The broker is killed and another started: engines and callers go on where they were."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from broker.client import BrokerError, BrokerGone, Client, RequestStream
from tests.core.driver import line
from tests.wire.rig import Counter, Reader, Rig, eventually, rig
from tests.wire.test_flow_control import limited, numbers


@contextlib.asynccontextmanager
async def under_way(
    folder: Path, engine: Counter, read: int, **client: Any
) -> AsyncIterator[tuple[Rig, RequestStream]]:
    """A request of which the caller has read so many numbers."""
    async with rig(folder, line("a"), {"a": engine}, **client) as made:
        stream = await made.submit()
        assert await numbers(stream, read) == list(range(read))
        yield made, stream


async def test_a_stream_goes_on_without_gap_or_repeat_and_its_job_is_not_run_again(tmp_path: Path) -> None:
    engine = Counter(60, allowed=20)
    async with under_way(tmp_path, engine, 10) as (made, stream):
        made.broker.kill()
        engine.allow(40)
        await eventually(lambda: engine.yielded == 40, "the job to go on without a broker")
        made.broker.start()
        assert await numbers(stream, 30) == list(range(10, 40))
        engine.allow(60)
        assert await numbers(stream) == list(range(40, 60))
        assert len(engine.jobs) == 1


async def test_a_job_that_ends_while_the_broker_is_away_is_not_run_again(tmp_path: Path) -> None:
    engine = Counter(60, allowed=20)
    async with under_way(tmp_path, engine, 20) as (made, stream):
        made.broker.kill()
        engine.allow(60)
        await eventually(lambda: not made.workers["a"].process.running, "the job to end without a broker")
        made.broker.start()
        assert await numbers(stream) == list(range(20, 60))
        assert len(engine.jobs) == 1


async def test_tensors_arrive_and_all_memory_is_freed(tmp_path: Path) -> None:
    first, second = Counter(24, floats=10_000, allowed=8), Reader(allowed=4)
    async with rig(tmp_path, line("a", "b"), {"a": first, "b": second}) as made:
        stream = await made.submit()
        assert await numbers(stream, 4) == list(range(4))
        made.broker.kill()
        first.allow(16)
        second.allow(6)
        await eventually(lambda: first.yielded == 16 and second.yielded == 6, "jobs to go on alone")
        made.broker.start()
        first.allow(24)
        second.allow(1 << 30)
        assert await numbers(stream) == list(range(4, 24))
        arena = made.workers["a"].process.arena
        await eventually(lambda: arena.usage().blocks == 0, "the blocks to be freed")
        session = made.workers["b"].process.session
        await eventually(lambda: not session.resync().holds, "the consumer to hold nothing")
        assert len(first.jobs) == len(second.jobs) == 1


async def test_a_job_that_was_held_back_goes_on_after_the_restart(tmp_path: Path) -> None:
    """What was said of chunks that were taken was lost with the broker, on either side."""
    first, second = Counter(300), Reader(allowed=1 << 30)
    async with rig(tmp_path, limited("a", "b"), {"a": first, "b": second}) as made:
        stream = await made.submit()
        seen = await numbers(stream, 7)
        for _ in range(3):
            await made.restart()
            seen += await numbers(stream, 50)
        assert seen + await numbers(stream) == list(range(300))
        assert len(first.jobs) == len(second.jobs) == 1


async def test_requests_that_are_submitted_while_it_is_away_are_served(tmp_path: Path) -> None:
    engine = Counter(5)
    async with rig(tmp_path, line("a"), {"a": engine}) as made:
        made.broker.kill()
        submitting = [asyncio.ensure_future(made.submit()) for _ in range(3)]
        asking = asyncio.ensure_future(made.client.inspect("ready"))
        made.broker.start()
        for stream in await asyncio.gather(*submitting):
            assert await numbers(stream) == list(range(5))
            stream.done()
        await asking
        assert len(engine.jobs) == 3


async def test_a_submission_that_is_repeated_asks_for_the_same_draws(tmp_path: Path) -> None:
    """A caller may have had some of the first answer, and gets the rest of the second."""
    engine, later = Counter(5, allowed=0), Counter(5)
    async with under_way(tmp_path, engine, 0) as (made, stream):
        await eventually(lambda: engine.jobs, "the job to begin")
        made.broker.kill()
        made.broker.lose_state()
        made.broker.start()
        await made.workers["a"].close()
        worker = made.workers["a"] = type(made.workers["a"])(made.broker.address, "a", later)
        await worker.start()
        assert await numbers(stream) == list(range(5))
        assert engine.jobs[0].seed == later.jobs[0].seed


async def test_a_request_that_is_aborted_while_it_is_away_ends(tmp_path: Path) -> None:
    engine = Counter(100, allowed=10)
    async with under_way(tmp_path, engine, 10) as (made, stream):
        made.broker.kill()
        stream.abort()
        made.broker.start()
        await eventually(lambda: engine.ended == 1, "the job to be stopped")
        await eventually(lambda: not made.workers["a"].process.running, "the job to be reported")


async def test_a_worker_that_leaves_meanwhile_finishes_and_leaves(tmp_path: Path) -> None:
    engine = Counter(40, allowed=10)
    async with under_way(tmp_path, engine, 10) as (made, stream):
        made.broker.kill()
        process = made.workers["a"].process
        process.drain()
        made.broker.start()
        await eventually(lambda: process.draining, "the broker to let it go")
        engine.allow(40)
        assert await numbers(stream) == list(range(10, 40))
        await asyncio.wait_for(process.done.wait(), 60)
        assert len(engine.jobs) == 1


async def test_another_client_continues_a_request_by_name(tmp_path: Path) -> None:
    engine = Counter(40, allowed=20)
    async with rig(tmp_path, line("a"), {"a": engine}) as made:
        first = await made.submit(stored=True, call=b"notes")
        assert await numbers(first, 15) == list(range(15))
        first.leave()
        async with Client(made.broker.address) as other:
            stream = await other.attach(first.name, {"out": 10})
            assert (stream.pipeline, stream.outputs, stream.call) == ("line", ["out"], b"notes")
            assert await numbers(stream, 10) == list(range(10, 20))
            await made.restart()
            engine.allow(40)
            assert await numbers(stream) == list(range(20, 40))
            stream.leave()
            stored = await other.attach(first.name)
            assert await numbers(stored) == list(range(40)), "it is kept for whoever comes next"
            stored.abort()
            with pytest.raises(BrokerError) as refused:
                await other.attach("no-such-request")
            assert refused.value.error.status == 404
        assert len(engine.jobs) == 1


async def test_a_client_that_was_given_up_gets_the_rest(tmp_path: Path) -> None:
    """It was stopped for longer than the broker's patience; its requests went on without it."""
    engine = Counter(40, floats=10_000, allowed=20)
    async with under_way(tmp_path, engine, 10, kind="gateway") as (made, stream):
        beating = made.client._beating
        assert beating is not None
        beating.cancel()  # the other half of a process that is stopped
        async with Client(made.broker.address) as other:
            while len((await other.inspect("status"))["clients"]) > 1:
                await asyncio.sleep(0.1)
        made.client._beating = asyncio.ensure_future(made.client._beat())
        engine.allow(40)
        assert await numbers(stream) == list(range(10, 40))
        assert len(engine.jobs) == 1


async def test_a_broker_that_knows_nothing_gets_what_can_be_asked_again(tmp_path: Path) -> None:
    engine, later = Counter(10, allowed=5), Counter(10)
    async with under_way(tmp_path, engine, 5) as (made, begun):
        made.broker.kill()
        waiting = asyncio.ensure_future(made.submit())
        made.broker.lose_state()
        made.broker.start()
        with pytest.raises(BrokerGone):
            await numbers(begun)
        stream = await waiting
        await made.workers["a"].close()
        worker = made.workers["a"] = type(made.workers["a"])(made.broker.address, "a", later)
        await worker.start()
        assert await numbers(stream) == list(range(10))
        stream.done()


async def test_a_broker_that_stays_away_fails_what_waits(tmp_path: Path) -> None:
    engine = Counter(10, allowed=5)
    async with under_way(tmp_path, engine, 5) as (made, stream):
        patience_s, made.client._patience_s = made.client._patience_s, 1.5
        made.broker.kill()
        with pytest.raises(BrokerGone, match="does not answer"):
            await numbers(stream)
        made.client._patience_s = patience_s  # a broker that starts slowly is none that stays away
        made.broker.start()
        await eventually(lambda: made.client._silent_s == 0, "the next broker to be heard")
        engine.allow(10)
        assert await numbers(await made.submit()) == list(range(10))


async def test_a_broker_that_stood_still_for_too_long_ends_what_its_client_gave_up(tmp_path: Path) -> None:
    """Else it would hold the request, its job and its memory for as long as the client lives."""
    engine = Counter(40, floats=10_000, allowed=10)
    async with under_way(tmp_path, engine, 5, kind="gateway") as (made, stream):
        broker = made.broker._process
        assert broker is not None
        patience_s, made.client._patience_s = made.client._patience_s, 1.5
        broker.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(BrokerGone, match="does not answer"):
                await numbers(stream)
            stream.done()
            made.client._patience_s = patience_s
        finally:
            broker.send_signal(signal.SIGCONT)
        await eventually(lambda: made.client._silent_s == 0, "the broker to be heard")
        await eventually(lambda: engine.ended, "the job to be stopped")
        async with asyncio.timeout(60):
            while (await made.client.inspect("status"))["tables"]["requests"]:
                await asyncio.sleep(0.01)
