"""Payloads to chunks and back; whatever goes wrong, no block is lost and the field is named."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.arena import SharedMemory
from adapters.chunk import INLINE_LIMIT, Chunk, body_fields, pack, unpack
from adapters.handle import (
    AdapterError,
    ArenaFull,
    BadHandle,
    BadPayload,
    BlockId,
    Handle,
    UnsupportedTensor,
)
from tests.adapters.conftest import RUN

BIG = np.arange(INLINE_LIMIT, dtype=np.float32)
Ext = msgspec.msgpack.Ext


def over_the_wire(chunk: Chunk) -> Chunk:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(chunk), type=Chunk)


def forged(payload: object, handles: list[Handle] | None = None) -> Chunk:
    return Chunk(0, False, msgspec.Raw(msgspec.msgpack.encode(payload)), handles or [])


NUMBERS = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
PLAIN = st.recursive(
    st.none() | NUMBERS | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=5), PLAIN, max_size=4))
def test_small_fields_arrive_as_they_were(payload: dict[str, Any]) -> None:
    chunk = over_the_wire(pack(payload, 3, None, last=True))
    assert (chunk.seq, chunk.last, chunk.handles) == (3, True, [])
    assert unpack(chunk, None, lambda block: None) == payload
    assert body_fields(chunk.body) == payload


def test_tensors_anywhere_in_a_payload(arena: SharedMemory, released: list[BlockId]) -> None:
    small = np.arange(4).reshape(2, 2)
    payload = {
        "text": "x",
        "a": BIG,
        "list": [1, BIG[::2].T, {"deep": BIG.reshape(2, -1)}],
        "small": (small,),
    }
    chunk = over_the_wire(pack(payload, 0, arena))
    assert len(chunk.handles) == 3
    got = unpack(chunk, arena, released.append)
    assert got["text"] == "x"
    assert (got["a"] == BIG).all()
    assert (got["list"][1] == BIG[::2]).all()
    assert (got["list"][2]["deep"] == BIG.reshape(2, -1)).all()
    assert (got["small"][0] == small).all()
    assert body_fields(chunk.body) == {
        "text": "x",
        "a": None,
        "list": [1, None, {"deep": None}],
        "small": [None],
    }
    assert released == []
    del got
    gc.collect()
    assert sorted(block.offset for block in released) == sorted(h.block.offset for h in chunk.handles)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0, 2), ()])
def test_empty_and_tiny_tensors_go_inline(shape: tuple[int, ...], arena: SharedMemory) -> None:
    sent = np.ones(shape, np.float16)
    chunk = over_the_wire(pack({"x": sent}, 0, arena))
    assert chunk.handles == []
    got = unpack(chunk, None, lambda block: None)["x"]
    assert (got.shape, got.dtype) == (sent.shape, sent.dtype)
    assert arena.usage().segments == 0


def test_the_limit_decides_what_goes_inline(arena: SharedMemory) -> None:
    assert pack({"x": np.zeros(INLINE_LIMIT, np.uint8)}, 0, arena).handles == []
    assert len(pack({"x": np.zeros(INLINE_LIMIT + 1, np.uint8)}, 0, arena).handles) == 1
    without = pack({"x": BIG}, 0, None)
    assert without.handles == []
    assert (unpack(without, None, lambda block: None)["x"] == BIG).all()


def test_inline_tensors_are_read_only_and_aligned() -> None:
    got = unpack(over_the_wire(pack({"pad": "x", "x": np.ones(7)}, 0, None)), None, lambda block: None)["x"]
    assert not got.flags.writeable
    assert got.flags.aligned


def test_torch_only_dtypes_inline() -> None:
    torch = pytest.importorskip("torch")
    sent = torch.randn(3, 4).to(torch.bfloat16)
    got = unpack(pack({"x": sent}, 0, None), None, lambda block: None)["x"]
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, sent)


def test_numpy_scalars_arrive_as_pythons() -> None:
    payload = {"a": np.float32(0.5), "b": np.int64(-3), "c": np.bool_(True), "d": np.float64(2.5)}
    got = unpack(pack(payload, 0, None), None, lambda block: None)
    assert got == {"a": 0.5, "b": -3, "c": True, "d": 2.5}
    assert {type(value) for value in got.values()} == {float, int, bool}


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("payload", "error", "field"),
    [
        ([1], BadPayload, "list"),
        (None, BadPayload, "NoneType"),
        ({"a": {"b": [0, object()]}}, BadPayload, r"payload\.a\.b\[1\]: object"),
        ({"a": 1j}, BadPayload, r"payload\.a: complex"),
        ({"a": np.complex64(1)}, BadPayload, r"payload\.a"),
        ({"a": np.longdouble(1)}, BadPayload, r"payload\.a"),
        ({"a": [2**70]}, BadPayload, r"payload\.a\[0\]"),
        ({"a": "\ud800"}, BadPayload, r"payload\.a"),
        ({"a": lambda: None}, BadPayload, r"payload\.a: function"),
        ({"a": LOOP}, BadPayload, r"payload\.a"),
        ({"a": np.array([object()])}, UnsupportedTensor, r"payload\.a: dtype object"),
        ({"a": [np.zeros(2, ">f4")]}, UnsupportedTensor, r"payload\.a\[0\]"),
    ],
)
@pytest.mark.parametrize("tensor_first", [False, True])
def test_what_cannot_travel_is_named_and_nothing_is_left_behind(
    payload: Any, error: type[AdapterError], field: str, tensor_first: bool, arena: SharedMemory
) -> None:
    if tensor_first and isinstance(payload, dict):
        payload = {"first": BIG, "second": [BIG], **payload}
    with pytest.raises(error, match=field):
        pack(payload, 0, arena)
    assert arena.usage().blocks == 0


def test_a_put_that_fails_in_the_middle_frees_what_came_before() -> None:
    with SharedMemory(RUN, ceiling=1 << 20, first_segment=1 << 20) as arena:
        with pytest.raises(ArenaFull, match=r"payload\.c\[1\]"):
            pack({"a": BIG, "b": BIG, "c": [BIG, np.zeros(900_000, np.uint8)]}, 0, arena)
        assert arena.usage().blocks == 0


BODIES: dict[str, object] = {
    "no map": [1],
    "number": 3,
    "number as key": {1: 2},
    "unknown extension": {"a": Ext(3, b"")},
    "index out of range": {"a": Ext(1, msgspec.msgpack.encode(2))},
    "index negative": {"a": Ext(1, msgspec.msgpack.encode(-1))},
    "index used twice": {"a": Ext(1, b"\0"), "b": Ext(1, b"\0")},
    "index no number": {"a": Ext(1, msgspec.msgpack.encode("0"))},
    "index empty": {"a": Ext(1, b"")},
    "inline nonsense": {"a": Ext(2, b"nonsense")},
    "inline empty": {"a": Ext(2, b"")},
    "inline 4 TiB in 3 bytes": {"a": Ext(2, msgspec.msgpack.encode(("float32", (1 << 20, 1 << 20), b"123")))},
    "inline negative": {"a": Ext(2, msgspec.msgpack.encode(("uint8", (-1, -3), b"123")))},
    "inline object": {"a": Ext(2, msgspec.msgpack.encode(("object", (1,), b"12345678")))},
    "inline sparse": {"a": Ext(2, msgspec.msgpack.encode(("sparse_coo", (1,), b"12345678")))},
    "inline impossible shape": {"a": Ext(2, msgspec.msgpack.encode(("uint8", (0, 1 << 62, 1 << 62), b"")))},
    "tensor, then nonsense": {"a": Ext(1, b"\0"), "b": Ext(9, b"")},
}


@pytest.mark.parametrize("name", BODIES)
def test_hostile_bodies_are_refused_and_every_handle_is_released_once(
    name: str, arena: SharedMemory, released: list[BlockId]
) -> None:
    handles = [arena.put(BIG), arena.put(BIG)]
    with pytest.raises((BadHandle, BadPayload)):
        unpack(over_the_wire(forged(BODIES[name], handles)), arena, released.append)
    gc.collect()
    assert sorted(released, key=lambda block: block.offset) == [handle.block for handle in handles]
    with pytest.raises((BadHandle, BadPayload)):
        unpack(forged(BODIES[name]), arena, released.append)


@given(st.binary(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bodies_never_escape_as_other_errors(released: list[BlockId], data: bytes) -> None:
    chunk = Chunk(0, False, msgspec.Raw(data))
    for decode in (lambda: unpack(chunk, None, released.append), lambda: body_fields(chunk.body)):
        with contextlib.suppress(BadHandle, BadPayload):
            assert isinstance(decode(), dict)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(BadPayload):
        unpack(Chunk(0, False, msgspec.Raw(b"\x81\xa1a" + b"\x91" * 100_000)), None, lambda block: None)


def test_unused_and_bad_handles_are_released(arena: SharedMemory, released: list[BlockId]) -> None:
    used, unused = arena.put(BIG), arena.put(BIG)
    got = unpack(forged({"a": Ext(1, b"\0")}, [used, unused]), arena, released.append)
    assert released == [unused.block]
    del got
    assert released == [unused.block, used.block]
    released.clear()
    arena.free(unused.block)
    with pytest.raises(BadHandle):
        unpack(forged({"a": Ext(1, b"\0"), "b": Ext(1, b"\1")}, [used, unused]), arena, released.append)
    gc.collect()
    assert {used.block, unused.block} == set(released)
    assert len(released) == 2
    released.clear()
    with pytest.raises(BadHandle):
        unpack(forged({"a": Ext(1, b"\0")}, [used]), None, released.append)
    assert released == [used.block]


def test_packing_and_unpacking_on_many_threads(arena: SharedMemory, released: list[BlockId]) -> None:
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            for step in range(100):
                sent = {"n": number, "big": BIG + number, "small": np.full(3, step)}
                chunk = over_the_wire(pack(sent, step, arena))
                got = unpack(chunk, arena, released.append)
                assert got["n"] == number
                assert (got["big"] == BIG + number).all()
                assert (got["small"] == step).all()
                del got
                for handle in chunk.handles:
                    assert released.count(handle.block) == 1
                    arena.free(handle.block)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert arena.usage().blocks == 0
