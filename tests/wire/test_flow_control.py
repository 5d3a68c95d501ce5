"""A slow reader slows its producer, and that one its own; nothing stands still for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from broker.client import RequestStream
from pipelines.graph import Limits, Pipeline
from tests.core.driver import line
from tests.wire.rig import Counter, Reader, Rig, eventually, rig

LIMITS = Limits(ahead_chunks=8, ahead_mb=64.0)


def limited(*stages: str, limits: Limits = LIMITS) -> Pipeline:
    """A line of stages with these limits."""
    return msgspec.structs.replace(line(*stages), limits=limits)


async def settled(made: Rig) -> None:
    """All that was under way has arrived: each round trip passes through every queue that holds messages."""
    for _ in range(3):
        await made.client.inspect("ready")


async def numbers(stream: RequestStream, count: int | None = None) -> list[int]:
    """The "n" of the next payloads, or of all."""
    found: list[int] = []
    while count is None or len(found) < count:
        item = await asyncio.wait_for(anext(stream, None), 60)
        if item is None:
            break
        found.append(item[1]["n"])
    return found


async def test_a_caller_that_reads_nothing_holds_its_stage_back(tmp_path: Path) -> None:
    engine = Counter(1000)
    async with rig(tmp_path, limited("a"), {"a": engine}) as made:
        stream = await made.submit()
        await eventually(lambda: engine.yielded == 9, "the stage to go as far as it may")
        await settled(made)
        assert engine.yielded == 9, "8 chunks are out, and one waits in the worker"
        assert await numbers(stream, 500) == list(range(500))
        await settled(made)
        assert 500 <= engine.yielded <= 500 + 2 + 9
        assert await numbers(stream) == list(range(500, 1000))


async def test_a_consumer_that_is_slow_holds_its_producer_back(tmp_path: Path) -> None:
    first, second = Counter(1000), Reader(allowed=0)
    async with rig(tmp_path, limited("a", "b"), {"a": first, "b": second}) as made:
        stream = await made.submit()
        await eventually(lambda: second.jobs and first.yielded == 9, "the first stage to be held back")
        await settled(made)
        assert first.yielded == 9
        second.allow(1 << 30)
        assert await numbers(stream) == list(range(1000))


async def test_a_slow_caller_slows_the_whole_line(tmp_path: Path) -> None:
    first, second = Counter(1000), Reader(allowed=1 << 30)
    async with rig(tmp_path, limited("a", "b"), {"a": first, "b": second}) as made:
        stream = await made.submit()
        await eventually(lambda: second.yielded == 9, "the second stage to be held back")
        await settled(made)
        assert second.yielded == 9
        assert first.yielded <= 9 + 8 + 1
        assert await numbers(stream) == list(range(1000))


async def test_bytes_count_as_chunks_do_and_one_chunk_always_passes(tmp_path: Path) -> None:
    engine = Counter(12, floats=1 << 19)  # 2 MiB each
    limits = Limits(ahead_chunks=1000, ahead_mb=5.0)
    async with rig(tmp_path, limited("a", limits=limits), {"a": engine}) as made:
        stream = await made.submit()
        await eventually(lambda: engine.yielded == 4, "three chunks to go and one to wait")
        await settled(made)
        assert engine.yielded == 4
        assert await numbers(stream) == list(range(12))
        stream.done()
        await eventually(
            lambda: made.workers["a"].process.arena.usage().blocks == 0, "its memory to be freed"
        )


@pytest.mark.parametrize("limits", [Limits(ahead_chunks=4), Limits(ahead_mb=0.001)])
async def test_a_consumer_that_wants_all_first_gets_more_than_the_limit(
    tmp_path: Path, limits: Limits
) -> None:
    first, second = Counter(100, floats=100), Counter(1)
    async with rig(tmp_path, limited("a", "b", limits=limits), {"a": first, "b": second}) as made:
        stream = await made.submit()
        assert await numbers(stream) == [0]


async def test_a_job_that_waits_to_go_on_can_be_cancelled(tmp_path: Path) -> None:
    engine = Counter(1000)
    async with rig(tmp_path, limited("a"), {"a": engine}) as made:
        stream = await made.submit()
        await eventually(lambda: engine.yielded == 9, "the stage to go as far as it may")
        stream.abort()
        await eventually(lambda: engine.ended == 1, "the job to end")
        await eventually(lambda: not made.workers["a"].process.running, "the job to be reported")


async def test_one_slow_caller_does_not_slow_another(tmp_path: Path) -> None:
    engine = Counter(300)
    async with rig(tmp_path, limited("a"), {"a": engine}) as made:
        await made.submit()
        await eventually(lambda: engine.yielded == 9, "the stage to go as far as it may")
        quick = await made.submit()
        assert await asyncio.wait_for(numbers(quick), 60) == list(range(300))
