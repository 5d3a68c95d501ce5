"""Tensors that go to disk: copies that outlive the arena, and what the arena has no room for."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from adapters.arena import SharedMemory
from adapters.chunk import Chunk, pack, pack_wait, unpack
from adapters.disk import DiskStore
from adapters.handle import ArenaFull, BadHandle, BlockId, UnsupportedTensor
from adapters.segment import HEADER, HEADER_SIZE, MAGIC
from tests.adapters.conftest import RUN

MIB = 1 << 20
NAME = "request-0"
BIG = np.arange(3 * MIB // 4, dtype=np.float32)  # two of them don't fit


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "chunks")


@pytest.fixture
def arena(store: DiskStore) -> Iterator[SharedMemory]:
    with SharedMemory(RUN, ceiling=4 * MIB, first_segment=MIB, store=store) as arena:
        yield arena


def files(store: DiskStore) -> list[str]:
    return sorted(str(path.relative_to(store.folder)) for path in store.folder.glob("*/*"))


def over_the_wire(chunk: Chunk) -> Chunk:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(chunk), type=Chunk)


def ignore(block: BlockId) -> None:
    pass


# --- spilling


async def test_an_arena_that_stays_full_spills_and_goes_on_in_memory_when_there_is_room(
    arena: SharedMemory, store: DiskStore, released: list[BlockId]
) -> None:
    held = pack({"x": BIG}, 0, arena)
    chunk = over_the_wire(
        await pack_wait({"x": BIG, "n": 1}, 1, arena, name=NAME, spill_after_s=0.05, last=True)
    )
    (handle,) = chunk.handles
    assert (chunk.seq, chunk.last, handle.transport, handle.block.place) == (1, True, "disk", files(store)[0])
    got = unpack(chunk, arena, released.append)
    assert (got["x"] == BIG).all()
    assert got["n"] == 1
    arena.free(held.handles[0].block)
    again = await pack_wait({"x": BIG}, 2, arena, name=NAME, spill_after_s=0.05)
    assert again.handles[0].transport == "shm"


async def test_space_that_comes_back_in_time_is_used(arena: SharedMemory, store: DiskStore) -> None:
    held = pack({"x": BIG}, 0, arena)
    waiting = asyncio.create_task(pack_wait({"x": BIG}, 1, arena, name=NAME, spill_after_s=20))
    await asyncio.sleep(0)
    arena.free(held.handles[0].block)
    assert (await waiting).handles[0].transport == "shm"
    assert files(store) == []


async def test_a_tensor_over_the_ceiling_spills_at_once(arena: SharedMemory) -> None:
    chunk = await pack_wait({"x": np.ones(5 * MIB, np.uint8)}, 0, arena, name=NAME, spill_after_s=1000)
    assert unpack(chunk, arena, ignore)["x"].sum() == 5 * MIB


async def test_without_a_request_there_is_no_place_on_disk(arena: SharedMemory, store: DiskStore) -> None:
    pack({"x": BIG}, 0, arena)
    with pytest.raises(ArenaFull):
        await pack_wait({"x": BIG}, 1, arena, timeout_s=0.05)
    assert files(store) == []


async def test_freeing_a_spilled_block_removes_its_file_once(arena: SharedMemory, store: DiskStore) -> None:
    pack({"x": BIG}, 0, arena)
    chunk = await pack_wait({"x": BIG, "y": [BIG]}, 1, arena, name=NAME, spill_after_s=0)
    first, second = chunk.handles
    view = arena.get(first, ignore)
    arena.free(first.block)
    assert files(store) == [second.block.place]
    assert (view == BIG).all()  # what was read stays
    arena.free(second.block)
    assert store.names() == []
    arena.free(second.block)
    assert arena.usage().stale_frees == 1


async def test_the_last_view_of_a_spilled_tensor_releases_it_once(
    arena: SharedMemory, released: list[BlockId]
) -> None:
    pack({"x": BIG}, 0, arena)
    chunk = await pack_wait({"x": BIG}, 1, arena, name=NAME, spill_after_s=0)
    view = unpack(chunk, arena, released.append)["x"]
    assert not view.flags.writeable
    part = view[10:][::2]
    del view
    gc.collect()
    assert released == []
    del part
    gc.collect()
    assert released == [chunk.handles[0].block]


async def test_arena_and_disk_full_fail_the_chunk_and_leave_nothing(tiny_tmpfs: Path) -> None:
    store = DiskStore(tiny_tmpfs / "chunks")
    with SharedMemory(RUN, ceiling=MIB, first_segment=MIB, store=store) as arena:
        first, second = np.zeros(700_000, np.uint8), np.ones(700_000, np.uint8)
        pack({"x": first}, 0, arena)
        with pytest.raises(ArenaFull, match=r"payload\.b: no space .*chunks") as caught:
            await pack_wait({"a": first, "b": second}, 1, arena, name=NAME, spill_after_s=0)
        assert not caught.value.retryable
        assert arena.usage().blocks == 1
        assert files(store) == []


async def test_what_cannot_travel_cannot_spill_either(arena: SharedMemory, store: DiskStore) -> None:
    pack({"x": BIG}, 0, arena)
    with pytest.raises(UnsupportedTensor, match=r"payload\.b"):
        await pack_wait({"a": BIG, "b": np.array([object()])}, 1, arena, name=NAME, spill_after_s=0)
    assert files(store) == []


TENSORS: dict[str, Any] = {
    "reversed": np.arange(20_000)[::-1],
    "transposed": np.arange(20_000).reshape(4, -1).T,
    "complex": np.full(20_000, 1 + 2j),
    "bool": np.arange(20_000) % 3 == 0,
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("durable", [False, True])
async def test_every_kind_of_tensor_arrives_from_disk_as_it_was(
    name: str, durable: bool, arena: SharedMemory
) -> None:
    tensor = TENSORS[name]
    if not durable:
        pack({"x": np.zeros(4 * MIB - 4096, np.uint8)}, 0, arena)
    chunk = await pack_wait({"x": tensor}, 0, arena, name=NAME, durable=durable, spill_after_s=0)
    (handle,) = chunk.handles
    if durable:
        (arena.folder / handle.block.place).unlink()
    assert durable or handle.transport == "disk"
    with SharedMemory(RUN, store=arena.store) as other:
        got = unpack(over_the_wire(chunk), other, ignore)["x"]
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert (got == tensor).all()


@pytest.mark.parametrize("durable", [False, True])
async def test_dtypes_that_only_torch_has_arrive_from_disk(durable: bool, arena: SharedMemory) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.randn(100, 200).to(torch.bfloat16).T
    if not durable:
        pack({"x": np.zeros(4 * MIB - 4096, np.uint8)}, 0, arena)
    chunk = await pack_wait({"x": tensor}, 0, arena, name=NAME, durable=durable, spill_after_s=0)
    if durable:
        (arena.folder / chunk.handles[0].block.place).unlink()
    with SharedMemory(RUN, store=arena.store) as other:
        assert torch.equal(unpack(chunk, other, ignore)["x"], tensor)


# --- copies


async def test_a_copy_is_read_when_the_segment_is_gone(
    arena: SharedMemory, store: DiskStore, released: list[BlockId]
) -> None:
    chunk = await pack_wait({"x": BIG, "small": np.arange(3)}, 0, arena, name=NAME, durable=True)
    (handle,) = chunk.handles
    assert (handle.transport, handle.copy) == ("shm", files(store)[0])
    arena.close()
    with SharedMemory(RUN, store=store) as other:
        got = unpack(over_the_wire(chunk), other, released.append)
        assert (got["x"] == BIG).all()
        del got
        gc.collect()
        assert released == [handle.block]  # the block that was lent, wherever it was read
        store.discard(NAME)
        with pytest.raises(BadHandle):
            unpack(chunk, other, released.append)
        assert released == [handle.block] * 2


async def test_a_copy_is_read_when_the_segment_is_not_what_it_was(
    arena: SharedMemory, store: DiskStore
) -> None:
    chunk = await pack_wait({"x": BIG}, 0, arena, name=NAME, durable=True)
    (handle,) = chunk.handles
    place = arena.folder / handle.block.place
    header = handle.block.offset - HEADER_SIZE
    fd = os.open(place, os.O_WRONLY)
    os.pwrite(fd, HEADER.pack(MAGIC, handle.block.generation + 1, handle.nbytes), header)  # it is another's
    os.close(fd)
    with SharedMemory(RUN, store=store) as other:
        assert (unpack(chunk, other, ignore)["x"] == BIG).all()
        os.truncate(place, header)
        assert (unpack(chunk, other, ignore)["x"] == BIG).all()


async def test_the_copy_is_not_touched_while_the_segment_is_there(
    arena: SharedMemory, store: DiskStore
) -> None:
    chunk = await pack_wait({"x": BIG}, 0, arena, name=NAME, durable=True)
    store.discard(NAME)
    assert (unpack(chunk, arena, ignore)["x"] == BIG).all()


async def test_a_durable_chunk_of_a_full_arena_is_on_disk_once(arena: SharedMemory, store: DiskStore) -> None:
    pack({"x": BIG}, 0, arena)
    chunk = await pack_wait({"x": BIG}, 1, arena, name=NAME, durable=True, spill_after_s=0)
    assert [handle.block.place for handle in chunk.handles] == files(store)


async def test_a_copy_that_cannot_be_written_frees_the_blocks(arena: SharedMemory, tiny_tmpfs: Path) -> None:
    arena.store = DiskStore(tiny_tmpfs / "chunks")
    with pytest.raises(ArenaFull, match="OMNI_STATE_DIR"):
        await pack_wait({"a": np.ones(100_000), "b": np.ones(100_000)}, 0, arena, name=NAME, durable=True)
    assert arena.usage().blocks == 0
    assert files(arena.store) == []


@pytest.mark.parametrize("full", [False, True])
async def test_a_caller_that_leaves_in_mid_write_leaves_no_file_and_no_block(
    full: bool, store: DiskStore
) -> None:
    payload = {"x": np.ones(64 * MIB, np.uint8)}
    with SharedMemory(RUN, ceiling=(1 if full else 100) * MIB, store=store) as arena:
        writing = asyncio.create_task(pack_wait(payload, 0, arena, name=NAME, durable=True))
        while not files(store):
            assert not writing.done()
            await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert arena.usage().blocks == 0
        while store.names():  # the thread finishes first
            await asyncio.sleep(0.001)


async def test_durable_needs_a_name_and_a_store(arena: SharedMemory) -> None:
    with pytest.raises(ValueError, match="name"):
        await pack_wait({"x": BIG}, 0, arena, durable=True)
    with SharedMemory(RUN) as storeless, pytest.raises(ValueError, match="store"):
        await pack_wait({"x": BIG}, 0, storeless, durable=True, name=NAME)


# --- hostile handles


async def test_places_in_handles_are_checked(
    arena: SharedMemory, store: DiskStore, released: list[BlockId]
) -> None:
    pack({"x": BIG}, 0, arena)
    chunk = await pack_wait({"x": BIG}, 1, arena, name=NAME, spill_after_s=0)
    (handle,) = chunk.handles
    change = msgspec.structs.replace
    gone = BlockId(f"omni-{RUN}-0123456789abcdef-0", 64, 1)
    for hostile in (
        *(change(handle, block=BlockId(place, 0, 0)) for place in ("../x", "\0", "", f"../chunks/{NAME}/x")),
        change(handle, transport="shm"),
        change(handle, transport="ucx"),
        change(handle, transport=""),
        change(handle, transport="shm", block=gone),
        change(handle, transport="shm", block=gone, copy="../x"),
        change(handle, transport="shm", block=gone, copy=f"{NAME}/\0"),
        change(handle, shape=(BIG.size - 1,), nbytes=BIG.nbytes - 4),
        change(handle, shape=(BIG.size + 1,), nbytes=BIG.nbytes + 4),
        change(handle, shape=(1 << 40,), nbytes=1 << 42),
        change(handle, dtype="object"),
    ):
        with pytest.raises(BadHandle):
            arena.get(hostile, released.append)
    assert released == []
    assert (arena.get(handle, ignore) == BIG).all()
    with SharedMemory(RUN) as storeless:
        with pytest.raises(BadHandle, match="has none"):
            storeless.get(handle, released.append)
        storeless.free(handle.block)
    assert files(store) == [handle.block.place]
