"""What the encoders of families take and give, as the engine ``omni-encoder`` sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from adapters.chunk import Payload
from workers.engine import ItemError

KINDS = ("audio", "image", "video")


class Medium(NamedTuple):
    """A clip, picture or film of a request."""

    kind: str  #: one of :data:`KINDS`
    data: NDArray[Any]  #: float32 [n] at 16 kHz; uint8 [H, W, 3]; uint8 [T, H, W, 3]
    fps: float = 0.0  #: frames a second of a film


class Encoder(Protocol):
    """A family's towers. Built with (checkpoint, options, device) on the engine's thread."""

    def encode(self, kind: str, media: Sequence[Medium]) -> list[Payload]:
        """One pass over media of one kind, on the engine's thread.

        Each one's payload has ``embeds`` float [n, hidden], for pictures and films ``grid`` [t, h, w], the
        patches that they were cut into, and for films ``seconds_per_grid``.

        Raises ItemError (400) for a medium that the model can't take; the others are then encoded alone.
        """
        ...


def media_of(request: Payload) -> list[tuple[int, Medium]]:
    """(index among its kind, medium) of all that a request carries. Raises ItemError (400)."""
    rates = request.get("video_fps", [])
    found: list[tuple[int, Medium]] = []
    for kind, field in (("audio", "audio"), ("image", "images"), ("video", "videos")):
        for index, data in enumerate(request.get(field, [])):
            rate = float(rates[index]) if kind == "video" and index < len(rates) else 0.0
            found.append((index, checked(Medium(kind, data, rate))))
    return found


def checked(medium: Medium) -> Medium:
    """The medium. Raises ItemError (400) for the wrong kind of array, or an empty one."""
    wanted = {"audio": (np.float32, 1), "image": (np.uint8, 3), "video": (np.uint8, 4)}
    dtype, axes = wanted[medium.kind]
    data = medium.data
    if not isinstance(data, np.ndarray) or data.dtype != dtype or data.ndim != axes:
        raise refused(f"{medium.kind}: expected {np.dtype(dtype)} with {axes} axes")
    if not data.size:
        raise refused(f"{medium.kind}: is empty")
    if axes > 1 and data.shape[-1] != 3:
        raise refused(f"{medium.kind}: expected three colours, got {data.shape[-1]}")
    if medium.kind == "audio" and not np.isfinite(data).all():
        raise refused("audio: holds NaN or infinity")
    if medium.kind == "video" and not medium.fps > 0:
        raise refused("video: its frames a second are not known")
    return medium


def refused(why: str) -> ItemError:
    """The error for a medium that can't be taken."""
    return ItemError(why, status=400, param="messages")
