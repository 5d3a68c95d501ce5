"""Windows of frames: nothing lost, nothing doubled, tails flushed, context where there is some (C18, C20)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.handle import BadPayload
from adapters.window import new_frames, windows


class Spec(NamedTuple):
    """A window setting."""

    frames: int
    left: int = 0
    right: int = 0
    first: int = 0
    largest: int = 0
    tensor: str = "frames"
    axis: int = -1


Payload = dict[str, Any]


async def stream(payloads: list[Payload]) -> AsyncIterator[Payload]:
    for payload in payloads:
        yield payload


async def cut(payloads: list[Payload], spec: Spec) -> list[Payload]:
    return [window async for window in windows(stream(payloads), spec)]


def lengths(spec: Spec) -> Iterator[int]:
    """New frames of a stream's windows, one after the other, where there are enough."""
    if spec.first:
        yield spec.first
    size = spec.frames
    while True:
        yield size
        size = max(size, min(2 * size, spec.largest))


def core(window: Payload) -> list[int]:
    """The new frames of a window of [1, F] frames."""
    frames = window["frames"]
    return frames[0, window["left"] : frames.shape[1] - window["right"]].tolist()


def chunks(count: int, sizes: list[int], start: int = 0) -> list[Payload]:
    """Frames start, start + 1, ... in chunks of the given sizes, over and over; the last ends the segment."""
    payloads: list[Payload] = []
    done = 0
    while done < count or not payloads:
        size = min(sizes[len(payloads) % len(sizes)], count - done)
        payloads.append({"frames": np.arange(start + done, start + done + size)[None]})
        done += size
    payloads[-1]["segment_end"] = True
    return payloads


@pytest.mark.parametrize("sizes", [[1000], [1], [4, 25]])
@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, []), (1, [1]), (3, [3]), (24, [24]), (25, [25]), (26, [25, 1]), (50, [25, 25])],
)
async def test_the_tail_is_flushed(count: int, expected: list[int], sizes: list[int]) -> None:
    got = await cut(chunks(count, sizes), Spec(25))
    assert [window["frames"].shape[1] for window in got] == expected
    ends = [window["segment_end"] for window in got]
    assert ends == [number == len(expected) - 1 for number in range(len(expected))]


@given(
    numbers=st.tuples(
        st.integers(1, 9), st.integers(0, 5), st.integers(0, 5), st.integers(0, 9), st.integers(0, 30)
    ),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    marked=st.booleans(),
)
def test_windows_tile_each_segment_with_the_context_there_is(
    numbers: tuple[int, int, int, int, int], counts: list[int], sizes: list[int], marked: bool
) -> None:
    spec = Spec(*numbers)
    payloads: list[Payload] = []
    for number, count in enumerate(counts):
        payloads += chunks(count, sizes, 1000 * number)
    if not marked:
        del payloads[-1]["segment_end"]  # the end of the stream ends the segment too
    got = asyncio.run(cut(payloads, spec))
    assert [window["index"] for window in got] == list(range(len(got)))
    assert sum(window["segment_end"] for window in got) == sum(1 for count in counts if count)
    rest, sizes_due = iter(got), lengths(spec)
    for number, count in enumerate(counts):
        at = 0
        while at < count:
            window = next(rest)
            size = next(sizes_due)
            new = core(window)
            assert new == list(range(1000 * number + at, 1000 * number + min(at + size, count)))
            assert window["left"] == min(spec.left, at)
            assert window["right"] == min(spec.right, count - at - len(new))
            start, stop = at - window["left"], at + len(new) + window["right"]
            assert window["frames"][0].tolist() == list(range(1000 * number + start, 1000 * number + stop))
            at += len(new)
            assert window["segment_end"] == (at == count)
    assert next(rest, None) is None
    # How the producer cut its frames makes no difference.
    whole = [payload for number, count in enumerate(counts) for payload in chunks(count, [99], 1000 * number)]
    again = asyncio.run(cut(whole, spec))
    assert [window["frames"].tolist() for window in again] == [window["frames"].tolist() for window in got]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (Spec(25), [25, 25, 25]),
        (Spec(25, first=5), [5, 25, 25]),
        (Spec(25, first=5, largest=100), [5, 25, 50, 100, 100]),
        (Spec(25, largest=60), [25, 50, 60, 60]),
        (Spec(7, first=9, largest=7), [9, 7, 7]),
    ],
)
async def test_windows_grow_to_twice_the_one_before_as_far_as_they_may(
    spec: Spec, expected: list[int]
) -> None:
    got = await cut(chunks(sum(expected), [3]), spec)
    assert [len(core(window)) for window in got] == expected
    assert new_frames(spec, 10_000) == expected[-1]


async def test_a_vocoder_that_loses_samples_at_its_end_gives_the_same_in_windows() -> None:
    """116 frames of 1280 samples less 555: each window's samples are cut by what its decoder really gave."""

    def decode(frames: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.repeat(frames[0], 1280)[: frames.shape[1] * 1280 - 555]

    frames = np.arange(116.0)[None]
    parts = []
    for window in await cut([{"frames": frames, "segment_end": True}], Spec(25, left=4, right=1, first=4)):
        samples = decode(window["frames"])
        stop = len(samples) if window["segment_end"] else (window["frames"].shape[1] - window["right"]) * 1280
        parts.append(samples[window["left"] * 1280 : stop])
    assert np.array_equal(np.concatenate(parts), decode(frames))


async def test_windows_leave_as_soon_as_their_context_is_there() -> None:
    sent: list[int] = []

    async def produce() -> AsyncIterator[Payload]:
        for number in range(20):
            sent.append(number)
            yield {"frames": np.full((1, 1), number)}

    got = windows(produce(), Spec(5, right=2))
    await anext(got)
    assert len(sent) == 7
    await anext(got)
    assert len(sent) == 12


async def test_other_fields_ride_along_and_marks_alone_end_a_segment() -> None:
    payloads: list[Payload] = [
        {"sample_rate": 22050, "text": "a"},
        {"frames": np.zeros((1, 5)), "text": "b"},
        {"segment_end": True},
        {"frames": np.zeros((1, 2)), "segment_end": True},
    ]
    got = await cut(payloads, Spec(3))
    assert [(window.get("text"), window.get("sample_rate")) for window in got] == [
        ("b", 22050),
        ("b", 22050),
        (None, None),
    ]
    assert [window["segment_end"] for window in got] == [False, True, True]


async def test_another_axis_and_torch_frames() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.arange(14).reshape(7, 2).to(torch.bfloat16)
    payloads = [{"x": rows[:3]}, {"x": rows[3:], "segment_end": True}]
    got = await cut(payloads, Spec(5, left=1, tensor="x", axis=0))
    assert [window["x"].shape for window in got] == [(5, 2), (3, 2)]
    assert torch.equal(got[1]["x"], rows[4:])


@pytest.mark.parametrize("bad", ["text", np.array(3.0), [1, 2]])
async def test_frames_that_are_no_frames_are_named(bad: object) -> None:
    with pytest.raises(BadPayload, match=r"payload\.frames"):
        await cut([{"frames": bad}], Spec(3))


async def test_frames_of_one_segment_must_fit_together() -> None:
    with pytest.raises(BadPayload, match="fit together"):
        await cut([{"frames": np.zeros((2, 1))}, {"frames": np.zeros((3, 5)), "segment_end": True}], Spec(4))
