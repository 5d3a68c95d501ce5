"""What the waveform decoders of families take and give, as the engine ``omni-code2wav`` sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Window(NamedTuple):
    """Some frames of an answer, with context."""

    codes: NDArray[np.int64]  #: [codebooks, n]
    voice: str
    seed: int  #: the job's
    place: int  #: which frame of the answer the first one is


class Decoder(Protocol):
    """A family's decoder. Built with (checkpoint, options, device) on the engine's thread."""

    codebooks: int
    codes: int  #: codes are below this
    cpu_batch: int  #: windows of one pass on a CPU: more would be no faster, or slower
    hop: int  #: samples a frame
    sample_rate: int

    def voice(self, name: str | None) -> str:
        """The voice of a name; None: the default. Raises ItemError (400) that lists the voices."""
        ...

    def decode(self, windows: Sequence[Window]) -> list[NDArray[np.float32]]:
        """One pass over windows of equal length, on the engine's thread: float32 [samples] each.

        What a window becomes must not depend on the others. A decoder that gives fewer samples than frames
        times ``hop`` does so at the beginning: see :func:`workers.engines.vits_decoder.trimmed`.
        """
        ...
