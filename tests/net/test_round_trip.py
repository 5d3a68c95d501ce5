"""Tensors of every kind come over from another host's process, bit by bit, and their blocks go back."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from adapters.arena import SharedMemory
from adapters.chunk import INLINE_LIMIT, Chunk, pack, unpack
from adapters.handle import BadHandle, BlockId, Handle, Unreachable
from adapters.host import this_host
from adapters.net.buffers import SMALLEST
from adapters.net.landing import Landing, landed
from adapters.net.wire import PIECE, WINDOW
from tests.net.rig import RUN, FarHost

TYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


def here(far: FarHost, *addresses: str, **options: float) -> Landing:
    return Landing("0" * 12, far.fetcher(*addresses, **options))


async def test_all_dtypes_and_shapes_arrive_bit_by_bit(far: FarHost, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("adapters.chunk.INLINE_LIMIT", -1)  # also what is empty travels by handle
    bits = np.random.default_rng(0).integers(0, 256, 9600, np.uint8)
    sent = {code: (bits % 2 if code == "?" else bits).view(code).reshape(-1, 5, 2) for code in TYPES}
    sent |= {"empty": np.zeros((0, 3), np.float32), "scalar": np.array(2.5)}
    torches = {
        name: torch.from_numpy(bits.copy()).view(getattr(torch, name))
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    }
    chunk = pack(sent | torches, 7, far.arena, last=True)
    landing = here(far, *far.start().addresses)
    released: list[BlockId] = []
    assert landing.foreign(chunk)
    landed = await landing.land(chunk, released.append)
    assert Counter(released) == Counter(handle.block for handle in chunk.handles)
    assert (landed.seq, landed.last, landed.body) == (7, True, chunk.body)
    assert not landing.foreign(landed)
    with SharedMemory(RUN) as ours:
        got = unpack(landed, ours, released.append)
    assert len(released) == len(chunk.handles), "what has landed is released once only"
    for code, array in sent.items():
        assert got[code].dtype == array.dtype
        assert got[code].shape == array.shape
        assert got[code].tobytes() == array.tobytes()
        assert not got[code].flags.writeable
    for name, tensor in torches.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("nbytes", [1, PIECE - 1, PIECE, PIECE + 1, (WINDOW + 3) * PIECE + 5])
async def test_blocks_of_any_size_arrive_whole(far: FarHost, nbytes: int) -> None:
    handle, sent = far.put(nbytes)
    assert bytes(await far.fetcher(*far.serve()).fetch(handle)) == sent


async def test_addresses_may_be_of_either_kind(far: FarHost) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    handle, sent = far.put(PIECE + 1)
    assert bytes(await far.fetcher(*far.serve("::1")).fetch(handle)) == sent


async def test_many_blocks_come_at_a_time(far: FarHost) -> None:
    blocks = [far.put(nbytes) for nbytes in (2 * PIECE + 1, 50, PIECE, 70_000)] * 3
    fetcher = far.fetcher(*far.serve())
    got = await asyncio.gather(*(fetcher.fetch(handle) for handle, _ in blocks))
    assert [bytes(data) for data in got] == [sent for _, sent in blocks]


async def test_a_small_block_does_not_wait_for_a_large_one(far: FarHost) -> None:
    large, _ = far.put(16 * PIECE)
    small, sent = far.put(20_000)
    fetcher = far.fetcher(*far.serve())
    first = asyncio.create_task(fetcher.fetch(large))
    await asyncio.sleep(0)
    assert bytes(await fetcher.fetch(small)) == sent
    assert not first.done()
    await first


async def test_memory_is_used_again_when_the_last_view_is_gone(far: FarHost) -> None:
    handle, sent = far.put(PIECE)
    other, _ = far.put(PIECE - 1)
    fetcher = far.fetcher(*far.serve())
    first = landed(handle, await fetcher.fetch(handle))
    with SharedMemory(RUN) as ours:
        view = ours.get(first, lambda block: None)[5:7]
    where = view.__array_interface__["data"][0]
    del first
    second = await fetcher.fetch(other)
    assert bytes(view) == sent[5:7], "a view that lives is not written over"
    del view
    gc.collect()
    third = np.asarray(await fetcher.fetch(handle))
    assert third.__array_interface__["data"][0] == where - 5
    assert third.tobytes() == sent
    del second, third
    assert fetcher._buffers.free_bytes >= 2 * PIECE - 1
    fetcher._buffers.trim(0)
    assert fetcher._buffers.free_bytes == fetcher._buffers.lent == 0


async def test_what_lies_here_is_left_alone(far: FarHost) -> None:
    ours = Landing(far.name, None)
    chunk = pack({"near": np.zeros(INLINE_LIMIT + 1, np.uint8)}, 0, far.arena)
    assert not ours.foreign(chunk)
    assert (await ours.land(chunk, lambda block: None)).handles == chunk.handles


async def test_files_of_the_disk_store_come_too(far: FarHost) -> None:
    data = np.arange(3 * PIECE, dtype=np.uint8)
    place = far.store.put("request-1", memoryview(data))
    handle, _ = far.put(data.nbytes)
    stored = type(handle)("disk", BlockId(place, 0, 0), data.nbytes, "uint8", data.shape)
    fetcher = far.fetcher(*far.serve())
    for _ in range(2):  # from the file, and as it was read
        assert bytes(await fetcher.fetch(stored)) == data.tobytes()
    far.store.discard("request-1")


async def test_the_copy_serves_when_the_block_is_gone(far: FarHost) -> None:
    handle, sent = far.put(100_000)
    place = far.store.put("request-1", memoryview(sent))
    copied = type(handle)("shm", handle.block, handle.nbytes, handle.dtype, handle.shape, copy=place)
    far.arena.close()
    assert bytes(await far.fetcher(*far.serve()).fetch(copied)) == sent
    # Its machine was restarted: it has another name, and only the store is what it was.
    fetcher = far.fetcher()
    fetcher.book = {far.store.name(): far.serve()}
    assert bytes(await fetcher.fetch(copied)) == sent
    far.store.discard("request-1")


async def test_a_damaged_file_is_an_error_and_no_data(far: FarHost) -> None:
    handle, sent = far.put(100_000)
    place = far.store.put("request-1", memoryview(sent))
    path = far.store.folder / place
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    stored = type(handle)("disk", BlockId(place, 0, 0), handle.nbytes, handle.dtype, handle.shape)
    with pytest.raises(BadHandle, match="damaged"):
        await far.fetcher(*far.serve()).fetch(stored)
    far.store.discard("request-1")


async def test_a_chunk_that_can_not_land_gives_all_its_blocks_back_once(far: FarHost) -> None:
    arrays = {name: np.full(INLINE_LIMIT + 1, number, np.uint8) for number, name in enumerate("abc")}
    chunk = pack(arrays, 0, far.arena)
    far.arena.free(chunk.handles[1].block)
    released: list[BlockId] = []
    with pytest.raises(BadHandle, match="generation"):
        await here(far, *far.serve()).land(chunk, released.append)
    assert Counter(released) == Counter(handle.block for handle in chunk.handles)


async def test_a_chunk_that_can_not_land_keeps_no_memory_of_what_has(
    far: FarHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until Python's collector comes by, which may be never where the same few objects come and go."""
    chunk = pack({"gone": np.zeros(SMALLEST, np.uint8), "here": np.zeros(SMALLEST, np.uint8)}, 0, far.arena)
    far.arena.free(chunk.handles[0].block)
    landing = here(far, *far.serve())
    assert landing.fetcher is not None
    fetch, landed = landing.fetcher.fetch, asyncio.Event()

    async def ordered(handle: Handle, transport: str) -> memoryview:
        if handle is chunk.handles[0]:
            await landed.wait()
            return await fetch(handle, transport)
        data = await fetch(handle, transport)
        landed.set()
        return data

    monkeypatch.setattr(landing.fetcher, "fetch", ordered)
    gc.collect()
    gc.disable()
    try:
        landing_task = asyncio.create_task(landing.land(chunk, lambda block: None))
        await asyncio.wait([landing_task])
        assert isinstance(landing_task.exception(), BadHandle)
        del landing_task
        await asyncio.sleep(0)
        assert landing.fetcher._buffers.lent == 0
    finally:
        gc.enable()


async def test_landing_that_is_cancelled_gives_all_blocks_back_once(far: FarHost) -> None:
    chunk = pack({"a": np.zeros(INLINE_LIMIT + 1), "b": np.ones(INLINE_LIMIT + 1)}, 0, far.arena)
    released: list[BlockId] = []
    landing = here(far)
    task = asyncio.create_task(landing.land(chunk, released.append))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert Counter(released) == Counter(handle.block for handle in chunk.handles)


async def test_a_process_that_fetches_nothing_says_so(far: FarHost, leaves_nothing: Path) -> None:
    chunk: Chunk = pack({"a": np.zeros(INLINE_LIMIT + 1)}, 0, far.arena)
    landing = Landing(this_host(leaves_nothing), None)
    with pytest.raises(Unreachable, match="another host"):
        await landing.land(chunk, lambda block: None)
