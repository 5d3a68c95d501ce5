"""Speech encoders: clipped and never wrapped, independent of how the samples are cut, cheap on memory."""

from __future__ import annotations

import numpy as np
import pytest

from broker.gateway.answer import PIECE_BYTES, Base64Pieces
from broker.gateway.audio import CONTENT_TYPES, encoder, to_int16


def test_loud_samples_are_clipped_and_never_wrapped() -> None:
    loud = np.array([0.0, 1.0, -1.0, 1.5, -1.5, 100.0, -100.0, np.inf, -np.inf], np.float32)
    values = np.frombuffer(to_int16(loud), "<i2").tolist()
    assert values == [0, 32767, -32767, 32767, -32767, 32767, -32767, 32767, -32767]


def test_rounding_is_to_the_nearest() -> None:
    exact = np.array([-5, 0, 1, 2, 1000], np.float32) / 32767
    assert np.frombuffer(to_int16(exact + 1e-6), "<i2").tolist() == [-5, 0, 1, 2, 1000]


@pytest.mark.parametrize("format_", CONTENT_TYPES)
@pytest.mark.parametrize("rate", [16_000, 22_050, 24_000, 12_345])
async def test_the_bytes_do_not_depend_on_how_samples_arrive(format_: str, rate: int) -> None:
    samples = np.random.default_rng(0).normal(0, 0.2, rate).astype(np.float32)
    results = set()
    for step in (rate, 11_520, 777):
        out = encoder(format_, rate)
        parts = [await out.feed(samples[i : i + step]) for i in range(0, rate, step)]
        results.add(b"".join([*parts, await out.finish()]))
    assert len(results) == 1


@pytest.mark.parametrize("format_", ["flac", "mp3", "opus", "aac"])
async def test_compressed_bytes_leave_while_samples_come(format_: str) -> None:
    out = encoder(format_, 24_000)
    second = np.random.default_rng(0).normal(0, 0.2, 24_000).astype(np.float32)
    assert all([await out.feed(second) for _ in range(3)])
    await out.finish()


@pytest.mark.parametrize("sizes", [[0], [1, 2, 3], [PIECE_BYTES * 3 + 5], [5] * 1000, [100_000, 1, 6, 7]])
def test_base64_pieces_are_small_and_joinable(sizes: list[int]) -> None:
    import base64

    data = np.random.default_rng(1).bytes(sum(sizes))
    pieces, cutter, start = [], Base64Pieces(), 0
    for size in sizes:
        pieces += cutter.feed(data[start : start + size])
        start += size
    pieces += cutter.finish()
    assert base64.b64decode("".join(pieces)) == b"".join(map(base64.b64decode, pieces)) == data
    assert all(len(piece) < 64 * 1024 for piece in pieces)
    assert all(len(base64.b64decode(piece)) % 6 == 0 for piece in pieces[:-1])
