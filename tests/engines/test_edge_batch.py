"""What an edge says of batching is what the engine of its consumer does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from pipelines.graph import EdgeBatch, Pipeline
from tests.core.driver import line
from workers.batching import BatchingEngine
from workers.config import EngineConfig
from workers.engines import make_engine


class Sizes(BatchingEngine[int, int]):
    """Gives each item the size of its batch."""

    def forward(self, items: Sequence[int]) -> Sequence[int]:
        return [len(items)] * len(items)


def consumer(**batch: Any) -> BatchingEngine[int, int]:
    """The engine of a stage whose own batches hold 8 items and wait for none."""
    pipeline: Pipeline = line("a", "b", engine=f"{__name__}:Sizes")
    edges = [
        msgspec.structs.replace(e, batch=EdgeBatch(**batch)) if e.to == "b" else e for e in pipeline.edges
    ]
    settings = EngineConfig("", b"w", b"g", "", msgspec.structs.replace(pipeline, edges=edges), "b")
    engine = make_engine(settings)
    assert isinstance(engine, BatchingEngine)
    return engine


async def sizes(engine: BatchingEngine[int, int], *, apart_s: float = 0.0) -> list[int]:
    """Four items, one after the other."""
    await engine.start()
    jobs = []
    for item in range(4):
        jobs.append(asyncio.ensure_future(engine.submit(item)))
        if apart_s:
            await asyncio.sleep(apart_s)
    try:
        return list(await asyncio.gather(*jobs))
    finally:
        await engine.stop()


async def test_an_edge_bounds_its_consumers_batches() -> None:
    assert await sizes(consumer(max_batch_size=2)) == [2, 2, 2, 2]


async def test_an_edge_has_its_consumer_wait_for_company() -> None:
    assert await sizes(consumer(accumulate_ms=600_000, max_batch_size=4), apart_s=0.01) == [4, 4, 4, 4]
    assert (await sizes(consumer(), apart_s=0.01))[0] == 1
