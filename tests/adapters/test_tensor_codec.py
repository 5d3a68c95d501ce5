"""What arrives equals what was sent to the bit; what can't be carried is refused at the sender (C52, C74)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters import tensor
from adapters.arena import SharedMemory
from adapters.handle import BadHandle, BlockId, UnsupportedTensor

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(1)
BASE = RNG.standard_normal((12, 10)).astype(np.float32)
ODD = np.lib.stride_tricks.as_strided(np.arange(8.0)[2:], shape=(1,), strides=(8 * 5,))

NUMPY = {
    "float32": BASE,
    "0-d": np.array(3.5),
    "empty": np.zeros((0, 3)),
    "empty in the middle": np.zeros((4, 0, 2), np.int16),
    "transposed": BASE.T,
    "column": BASE[:, 3],
    "every third row, backwards": BASE[::-3, ::-1],
    "expanded": np.broadcast_to(BASE[0], (5, 10)),
    "size-1 dimension with an odd stride": ODD,
    "fortran order": np.asfortranarray(BASE),
    "unaligned": np.frombuffer(bytes(range(81)), np.uint8)[1:].view(np.float64),
    "read-only": np.frombuffer(b"12345678", np.int32),
    "nan payload": np.array([0x7FC00001, 0xFF800001], np.uint32).view(np.float32),
    "many dimensions": np.arange(2.0).reshape((1,) * 31 + (2,)),
    **{
        f"dtype {code}": np.frombuffer(RNG.bytes(64), np.uint8).view(code)
        for code in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f8", "c8", "c16")
    },
    "dtype bool": RNG.integers(0, 2, 33).astype(bool),
}

BITS = torch.from_numpy(RNG.integers(0, 255, (6, 8), np.uint8))
TORCH = {
    "bfloat16": torch.randn(5, 7).to(torch.bfloat16),
    "bfloat16 transposed": torch.randn(5, 7).to(torch.bfloat16).T,
    "bfloat16 0-d": torch.tensor(1.5, dtype=torch.bfloat16),
    "bfloat16 empty": torch.zeros(0, 3, dtype=torch.bfloat16),
    "fp8 e4m3": BITS.view(torch.float8_e4m3fn),
    "fp8 e4m3 slice": BITS.view(torch.float8_e4m3fn)[::2, 1::3],
    "fp8 e5m2": BITS.view(torch.float8_e5m2),
    "half": torch.randn(3).half(),
    "bool": torch.tensor([True, False]),
    "complex64": torch.randn(4, dtype=torch.complex64),
    "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
    "imaginary part of a conjugate": torch.randn(4, dtype=torch.complex64).conj().imag,
    "expanded": torch.randn(3, 1).expand(3, 4),
    "requires grad": torch.randn(3, requires_grad=True),
    "grad of a computation": torch.randn(3, requires_grad=True) * 2,
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    "size-1 dimension with an odd stride": torch.randn(12).as_strided((1,), (8,)),
}


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_arrays_arrive_bit_equal(name: str, arena: SharedMemory, released: list[BlockId]) -> None:
    sent = NUMPY[name]
    handle = arena.put(sent)
    got = arena.get(handle, released.append)
    assert got.dtype == sent.dtype
    assert got.shape == sent.shape
    assert got.tobytes() == sent.tobytes()
    assert handle.nbytes == sent.nbytes
    assert not got.flags.writeable


@pytest.mark.parametrize("name", TORCH)
def test_torch_tensors_arrive_bit_equal(name: str, arena: SharedMemory, released: list[BlockId]) -> None:
    sent = TORCH[name]
    handle = arena.put(sent)
    assert f"torch.{handle.dtype}" == str(sent.dtype)
    got = arena.get(handle, released.append)
    if isinstance(got, np.ndarray):
        got = torch.from_numpy(got.copy())
    assert got.dtype == sent.dtype
    assert got.shape == sent.shape
    plain = sent.detach().resolve_conj().resolve_neg().contiguous()
    assert bytes_of(got) == bytes_of(plain)


def bytes_of(value: Any) -> bytes:
    fresh = torch.empty(value.shape, dtype=value.dtype).copy_(value)  # usual strides, whatever value's
    return bytes(fresh.flatten().view(torch.uint8).numpy()) if value.numel() else b""


REFUSED: dict[str, Callable[[], object]] = {
    "object": lambda: np.array([object()]),
    "structured": lambda: np.zeros(2, [("a", "i4")]),
    "text": lambda: np.array(["x"]),
    "time": lambda: np.array(["2020-01-01"], "M8[D]"),
    "long double": lambda: np.zeros(2, np.longdouble),
    "foreign byte order": lambda: np.zeros(2, ">f4"),
    "masked": lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
    "meta device": lambda: torch.zeros(3, device="meta"),
    "complex half": lambda: torch.zeros(3, dtype=torch.complex32),
    "no tensor": lambda: [1, 2],
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_is_refused_at_the_sender(name: str, arena: SharedMemory) -> None:
    with pytest.raises(UnsupportedTensor):
        arena.put(REFUSED[name]())
    assert arena.usage().segments == 0


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("float32", (2**20, 2**20), 1500),
        ("float32", (-1, -4), 16),
        ("float32", (4,), 15),
        ("object", (1,), 8),
        ("sparse", (2,), 8),
        ("float32", (1,) * 33, 4),
        ("float32", (0, 2**62), 4),
    ],
)
def test_declared_sizes_are_checked_before_anything_is_made(
    dtype: str, shape: tuple[int, ...], nbytes: int
) -> None:
    with pytest.raises(BadHandle):
        tensor.from_bytes(dtype, shape, bytes(nbytes))


def test_an_impossible_empty_shape_is_a_bad_handle() -> None:
    with pytest.raises(BadHandle):
        tensor.from_bytes("float32", (0, 2**62, 2**62), b"")


def test_sending_never_imports_torch_and_receiving_names_it(folder: Path) -> None:
    script = """
import sys, numpy as np
from adapters import tensor
from adapters.arena import SharedMemory
from adapters.chunk import pack, unpack
from adapters.handle import UnsupportedTensor
with SharedMemory("5eed" * 4) as arena:
    chunk = pack({"a": np.zeros(100_000), "b": np.zeros(3)}, 0, arena)
    unpack(chunk, arena, print)
assert "torch" not in sys.modules
sys.modules["torch"] = None  # as if it were not installed
try:
    tensor.from_bytes("bfloat16", (1,), b"12")
except UnsupportedTensor as error:
    assert "torch" in str(error) and "bfloat16" in str(error)
else:
    raise AssertionError
"""
    root = Path(__file__).parents[2]
    env = {"PYTHONPATH": str(root), "OMNI_SHM_DIR": str(folder)}
    subprocess.run([sys.executable, "-P", "-c", script], check=True, timeout=300, env=env)
