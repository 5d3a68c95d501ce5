"""Cutting a stream of frames into windows with context, as an edge's ``window`` setting says.

The producer may deliver frames in chunks of any length; the windows don't depend on how it did. A payload
with ``segment_end`` ends a segment (a sentence, say). Windows never cross that border and lend no context
over it: at a segment's borders ``left`` or ``right`` is simply smaller. What is left at the end is flushed.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import numpy as np

from adapters import tensor
from adapters.handle import BadPayload

Payload = dict[str, Any]


class WindowSpec(Protocol):
    """What a window setting says; see ``pipelines.graph.Window``."""

    @property
    def frames(self) -> int:
        """New frames of a window."""

    @property
    def left(self) -> int:
        """Frames of context before them."""

    @property
    def right(self) -> int:
        """Frames of context after them."""

    @property
    def first(self) -> int:
        """New frames of the stream's very first window; 0: as ``frames``."""

    @property
    def largest(self) -> int:
        """New frames up to which windows grow, each to twice those of the one before; 0: they don't."""

    @property
    def tensor(self) -> str:
        """The payload field that is cut."""

    @property
    def axis(self) -> int:
        """Its frame axis."""


async def windows(payloads: AsyncIterator[Payload], window: WindowSpec) -> AsyncIterator[Payload]:
    """Cuts the frames of a stream of payloads into windows.

    Each window is a payload with the cut tensor (``left`` + new + ``right`` frames), the numbers ``left`` and
    ``right``, ``index`` (counts the stream's windows from 0), ``segment_end`` (true in a segment's last
    window) and the other fields that the segment's payloads had so far, the latest of each name. A segment
    without a frame gives no window. A payload without the tensor only adds its fields, or ends the segment.

    A window waits for its right context, or for one more frame where there is none, since only then is it
    known whether it is the segment's last.

    Raises :class:`BadPayload` when the frames of a segment don't fit together.
    """
    segment = _Segment(window)
    index = 0
    async for payload in payloads:
        ended = bool(payload.get("segment_end"))
        segment.add(payload)
        for cut in segment.cuts(index, ended=ended):
            yield cut
            index += 1
        if ended:
            segment = _Segment(window)
    for cut in segment.cuts(index, ended=True):
        yield cut


def new_frames(window: WindowSpec, index: int) -> int:
    """How many new frames a stream's window of this index has, where its segment has as many left."""
    if window.first:
        if index == 0:
            return window.first
        index -= 1
    largest = max(window.frames, window.largest)
    return min(window.frames << min(index, largest.bit_length()), largest)


class _Segment:
    """The frames of one segment that are still needed."""

    def __init__(self, window: WindowSpec) -> None:
        self._window = window
        self._fields: Payload = {}
        self._parts: list[Any] = []
        self._past = 0  # frames at the front of the parts that are context only
        self._waiting = 0  # frames after them

    def add(self, payload: Payload) -> None:
        """Takes a payload's frames and fields."""
        name, axis = self._window.tensor, self._window.axis
        frames = payload.get(name)
        self._fields |= {key: value for key, value in payload.items() if key not in (name, "segment_end")}
        if frames is None:
            return
        if not tensor.is_tensor(frames) or not -frames.ndim <= axis < frames.ndim:
            raise BadPayload(f"payload.{name} is no tensor with a frame axis {axis}")
        if frames.shape[axis]:
            self._parts.append(frames)
            self._waiting += frames.shape[axis]

    def cuts(self, index: int, *, ended: bool) -> Iterator[Payload]:
        """The windows that are complete now, the first with this index."""
        while True:
            frames = new_frames(self._window, index)
            if self._waiting < (1 if ended else frames + max(self._window.right, 1)):
                return
            yield self._cut(frames, index, ended=ended)
            index += 1

    def _cut(self, frames: int, index: int, *, ended: bool) -> Payload:
        name, axis = self._window.tensor, self._window.axis
        held = self._parts[0] if len(self._parts) == 1 else _join(self._parts, axis, name)
        new = min(frames, self._waiting)
        left = min(self._window.left, self._past)
        right = min(self._window.right, self._waiting - new)
        cut = _slice(held, axis, self._past - left, self._past + new + right)
        self._waiting -= new
        drop = max(self._past + new - self._window.left, 0)
        self._past += new - drop
        self._parts = [_slice(held, axis, drop, held.shape[axis])]
        last = ended and not self._waiting
        return {**self._fields, name: cut, "left": left, "right": right, "index": index, "segment_end": last}


def _slice(frames: Any, axis: int, start: int, stop: int) -> Any:
    return frames[(slice(None),) * (axis % frames.ndim) + (slice(start, stop),)]


def _join(parts: list[Any], axis: int, name: str) -> Any:
    try:
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts, axis)
        return sys.modules["torch"].cat(parts, axis)
    except (ValueError, TypeError, RuntimeError) as error:
        raise BadPayload(f"payload.{name}: frames of a segment don't fit together: {error}") from None
