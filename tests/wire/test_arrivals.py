"""Chunks from another host on their way into a job: in order, not too far ahead, and never left behind."""

from __future__ import annotations

import asyncio
import errno
import gc
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from adapters.arena import SharedMemory
from adapters.chunk import Chunk, pack
from adapters.handle import AdapterError, BlockId, Unreachable
from adapters.host import host_of, this_host
from adapters.net.buffers import Buffers
from adapters.net.server import DataServer
from adapters.reader import Reader
from broker.abroad import Abroad
from broker.keys import KeysError
from broker.protocol import EdgeInput, Hosts
from pipelines.graph import Edge, Pipeline, Prefetch
from tests.wire.conftest import line
from tests.wire.rig import eventually
from workers.inputs import Inputs

RUN = "0123456789abcdef"


class Consumer:
    """The inputs of one job here, whose chunks are made on another host."""

    def __init__(self, folder: Path, **edge: Any) -> None:
        there, here = folder / "there", folder / "here"
        there.mkdir()
        here.mkdir()
        self.producer = SharedMemory(RUN, folder=there)
        self.arena = SharedMemory(RUN, folder=here)
        self.server = DataServer(RUN, "127.0.0.1", Reader(there), secure=None)
        self.abroad = Abroad(RUN, self.arena)
        self.released: Counter[BlockId] = Counter()
        self.took: list[int] = []
        pipeline = line("a", "b")
        edges = [msgspec.structs.replace(e, **edge) if e.to == "b" else e for e in pipeline.edges]
        self.pipeline: Pipeline = msgspec.structs.replace(pipeline, edges=edges)
        self.number = next(n for n, e in enumerate(edges) if e.to == "b")
        self.inputs = Inputs(
            self.pipeline,
            [EdgeInput(self.number, [], False)],
            self.arena,
            self.abroad,
            released=lambda block: self.released.update([block]),
            took=lambda edge, chunks, nbytes: self.took.append(chunks),
        )
        (self.stream,) = self.inputs.ends().values()
        self.sent = 0

    def meet(self) -> None:
        """The broker names the data server."""
        self.abroad.learn(Hosts({this_host(self.producer.folder): self.server.addresses}))

    def feed(self, count: int, *, closed: bool = False, small: bool = False) -> list[Chunk]:
        """So many chunks come, each with its number."""
        chunks = [self._chunk(n, small=small) for n in range(self.sent, self.sent + count)]
        self.sent += count
        self.inputs.feed(EdgeInput(self.number, chunks, closed))
        return chunks

    def _chunk(self, n: int, *, small: bool) -> Chunk:
        data = np.full(4 if small else 5000 + 300_000 * (n % 2 == 0), n, np.float32)
        return pack({"n": n, "data": data}, n, self.producer)

    def close(self) -> None:
        self.inputs.close()
        self.abroad.close()
        self.server.close()
        self.producer.close()
        self.arena.close()


@pytest.fixture(autouse=True)
def pieces_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends are in this process, which keeps what UCX opens; `tests/net` has processes for it."""
    monkeypatch.setattr("adapters.net.server.has_ucx", lambda: False)


@pytest.fixture
def consumers(tmp_path: Path) -> Iterator[Any]:
    made: list[Consumer] = []

    def make(**edge: Any) -> Consumer:
        made.append(Consumer(tmp_path, **edge))
        return made[-1]

    yield make
    while made:  # pytest keeps what made them
        made.pop().close()


async def numbers(stream: AsyncIterator[dict[str, Any]]) -> list[int]:
    found = []
    async for payload in stream:
        assert (payload["data"] == payload["n"]).all()
        found.append(payload["n"])
    return found


async def test_chunks_of_all_sizes_keep_their_order(consumers: Any) -> None:
    consumer = consumers()
    consumer.meet()
    consumer.feed(5)
    consumer.feed(3, small=True)  # these ride in their messages, and must not overtake
    consumer.feed(6)
    consumer.feed(0, closed=True)
    assert await numbers(consumer.stream) == list(range(14))
    assert len(consumer.released) == 11
    assert set(consumer.released.values()) == {1}


async def test_no_more_is_pulled_than_the_window_before_the_job_reads(consumers: Any) -> None:
    consumer = consumers(prefetch=Prefetch(window=3))
    consumer.meet()
    consumer.feed(8)
    await eventually(lambda: len(consumer.released) >= 3, "three chunks to land")
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(consumer.released) == 3
    await anext(consumer.stream)
    await eventually(lambda: len(consumer.released) == 4, "a fourth")
    consumer.feed(0, closed=True)
    assert await numbers(consumer.stream) == list(range(1, 8))


async def test_what_a_job_takes_is_counted_as_on_one_host(consumers: Any) -> None:
    consumer = consumers()
    consumer.meet()
    ahead = consumer.pipeline.limits.ahead_chunks
    consumer.feed(ahead, small=True)
    consumer.feed(1)
    for _ in range(ahead + 1):
        await anext(consumer.stream)
    assert consumer.took[0] == ahead // 4


@pytest.mark.parametrize("begun", [False, True])
async def test_a_job_that_ends_early_leaves_no_block_behind(consumers: Any, *, begun: bool) -> None:
    consumer = consumers(prefetch=Prefetch(window=2))
    if begun:
        consumer.meet()
    chunks = consumer.feed(6)
    if begun:
        await anext(consumer.stream)
    consumer.inputs.close()
    blocks = {handle.block for chunk in chunks for handle in chunk.handles}
    await eventually(lambda: set(consumer.released) == blocks, "all to be released")
    for _ in range(20):
        await asyncio.sleep(0)
    assert set(consumer.released.values()) == {1}


@pytest.mark.parametrize("foreign", [False, True])
async def test_nothing_comes_after_a_chunk_that_cannot_be_read(consumers: Any, *, foreign: bool) -> None:
    """A job that has not yet read what came before would take the next one for the one that is missing."""
    consumer = consumers()
    if foreign:
        consumer.meet()
    producer = consumer.producer if foreign else consumer.arena
    chunks = [pack({"n": n, "data": np.full(5000, n, np.float32)}, n, producer) for n in range(4)]
    (lost,) = chunks[1].handles
    producer.free(lost.block)
    consumer.inputs.feed(EdgeInput(consumer.number, chunks[:2], False))
    await eventually(lambda: lost.block in consumer.released, "the lost one")
    consumer.inputs.feed(EdgeInput(consumer.number, chunks[2:], True))
    assert (await anext(consumer.stream))["n"] == 0
    with pytest.raises(AdapterError):
        await anext(consumer.stream)
    blocks = {handle.block for chunk in chunks for handle in chunk.handles}
    await eventually(lambda: set(consumer.released) == blocks, "all to be released")
    assert set(consumer.released.values()) == {1}


async def test_a_host_out_of_reach_is_named_with_the_edge(
    consumers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_FETCH_S", "0.2")
    consumer = consumers()
    consumer.feed(1, small=True)
    (chunk,) = consumer.feed(1)
    assert (await anext(consumer.stream))["n"] == 0
    with pytest.raises(Unreachable) as caught:
        await anext(consumer.stream)
    assert "a -> b" in str(caught.value)
    assert host_of(chunk.handles[0].block.place) in str(caught.value)
    assert list(consumer.released.values()) == [1]


async def test_a_host_that_cannot_take_a_block_fails_the_job_with_the_reason(
    consumers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Buffers, nbytes: int) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(Buffers, "take", full)
    consumer = consumers()
    consumer.meet()
    chunks = consumer.feed(2)
    with pytest.raises(AdapterError, match=r"a -> b: OSError.*Cannot allocate memory"):
        await asyncio.wait_for(anext(consumer.stream), 60)
    blocks = {handle.block for chunk in chunks for handle in chunk.handles}
    await eventually(lambda: set(consumer.released) == blocks, "all to be released")
    assert set(consumer.released.values()) == {1}


async def test_keys_that_can_not_be_used_leave_no_block_behind(
    consumers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were fit for use when the worker started, or it would not know the broker."""

    def unusable() -> None:
        raise KeysError("others can read or change client.key_secret")

    monkeypatch.setattr("broker.keys.Shared.find", unusable)
    consumer = consumers()
    consumer.meet()
    chunks = consumer.feed(2)
    with pytest.raises(AdapterError, match="KeysError: others can read"):
        await anext(consumer.stream)
    blocks = {handle.block for chunk in chunks for handle in chunk.handles}
    await eventually(lambda: set(consumer.released) == blocks, "all to be released")
    assert set(consumer.released.values()) == {1}


async def test_an_edge_that_fails_keeps_no_memory_of_what_was_on_its_way(
    consumers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until Python's collector comes by, which may be never where the same few objects come and go."""
    buffers: list[Buffers] = []
    take = Buffers.take

    def taken(self: Buffers, nbytes: int) -> memoryview:
        buffers.append(self)
        return take(self, nbytes)

    monkeypatch.setattr(Buffers, "take", taken)
    consumer = consumers()
    consumer.meet()
    gc.collect()
    gc.disable()
    try:
        chunk = consumer._chunk(0, small=False)
        consumer.producer.free(chunk.handles[0].block)
        consumer.inputs.feed(EdgeInput(consumer.number, [chunk], True))
        with pytest.raises(AdapterError, match="generation"):
            await anext(consumer.stream)
        consumer.inputs.close()
        await asyncio.sleep(0)
        assert buffers
        assert buffers[0].lent == 0
    finally:
        gc.enable()


async def test_a_server_that_is_announced_late_is_waited_for(consumers: Any) -> None:
    consumer = consumers()
    consumer.feed(2, closed=True)
    reading = asyncio.ensure_future(numbers(consumer.stream))
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(reading), 0.1)
    consumer.meet()
    assert await reading == [0, 1]


async def test_an_edge_that_wants_shared_memory_says_so(consumers: Any) -> None:
    consumer = consumers(transport="shm")
    consumer.meet()
    consumer.feed(1)
    with pytest.raises(Unreachable, match="a -> b: its transport is shm"):
        await anext(consumer.stream)


def test_edges_are_plain_unless_they_say_otherwise() -> None:
    edge = Edge("a", "b")
    assert (edge.transport, edge.prefetch.window) == ("auto", 4)
