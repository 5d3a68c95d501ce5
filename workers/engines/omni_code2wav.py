"""Engine ``omni-code2wav``: a talker's codes, window by window, to a waveform.

Which model's decoder, says the option ``family``. Windows of equal length that wait at the same time share a
pass; on a CPU as many passes run side by side as there are threads, over no more windows each than is faster
there. A window's waveform depends on its codes, its place and the job's seed alone, so a new attempt goes on
with the first window whose audio is not out yet.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Hashable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adapters.chunk import Payload
from pipelines.graph import Stage
from pipelines.options import OmniCode2WavOptions, options_of
from workers.batching import BatchingEngine
from workers.engine import OUT, ItemError, Job
from workers.engines.vits import finite
from workers.engines.vits_decoder import trimmed
from workers.families.find import find_class
from workers.families.libraries import load_libraries
from workers.families.waves import Decoder, Window
from workers.params import checked

Array = NDArray[np.float32]


class VoiceParams(msgspec.Struct, frozen=True):
    """A request's wishes."""

    voice: str | None = None  #: where the talker's payloads name none


class OmniCode2WavEngine(BatchingEngine[Window, Array]):
    """Windows {"frames": int [codebooks, n], "left", "right"} in, {"audio", "sample_rate"} out."""

    _decoder: Decoder

    def __init__(self, stage: Stage, *, device: str) -> None:
        super().__init__(stage, device=device)
        self.options = options_of(stage, OmniCode2WavOptions)
        if device == "cpu":
            self.lanes = stage.resources.threads or len(os.sched_getaffinity(0))

    def load(self) -> None:
        """Loads the decoder. Raises as the encoder of :mod:`workers.engines.omni_encoder` does."""
        load_libraries(self.stage, threads=1)
        family = find_class(self.options.family)
        self._decoder = family(self.stage.model or "", self.options, self.device)
        if self.device == "cpu":
            self.max_batch_size = min(self.max_batch_size, self._decoder.cpu_batch)

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """Decodes each window as it comes; the windows' audio joined is the answer's."""
        params = checked(job.params, VoiceParams)
        decoder, number, place = self._decoder, 0, 0  # windows; frames before this one's new ones
        for stream in job.inputs.values():
            async for payload in stream:
                codes, left, right = self._codes(payload)
                new = codes.shape[1] - left - right
                if new <= 0:
                    continue
                if number < job.emitted:
                    yield OUT
                else:
                    voice = decoder.voice(payload.get("voice", params.voice))
                    decoded = await self.submit(Window(codes, voice, job.seed, place - left))
                    audio = trimmed(decoded, left=left, new=new, right=right, hop=decoder.hop)
                    yield {"audio": audio, "sample_rate": decoder.sample_rate}
                number += 1
                place += new

    def _codes(self, payload: Payload) -> tuple[NDArray[np.int64], int, int]:
        codes, left, right = as_array(payload.get("frames")), payload.get("left", 0), payload.get("right", 0)
        books = self._decoder.codebooks
        if codes is None or codes.ndim != 2 or len(codes) != books:
            raise ItemError(f"frames: expected whole numbers [{books}, n]: codes of another model?")
        if not isinstance(left, int) or not isinstance(right, int) or min(left, right) < 0:
            raise ItemError("left, right: expected counts of frames")
        if codes.size and not 0 <= codes.min() <= codes.max() < self._decoder.codes:
            raise ItemError(
                f"frames: codes from {codes.min()} to {codes.max()}; the decoder knows 0 to "
                f"{self._decoder.codes - 1}"
            )
        return codes, left, right

    def key(self, item: Window) -> Hashable:
        """Equal lengths go together."""
        return item.codes.shape

    def forward(self, items: Sequence[Window]) -> list[Array | Exception]:
        """One pass: waveforms [samples]."""
        return [finite(wave) for wave in self._decoder.decode(items)]


def as_array(codes: Any) -> NDArray[np.int64] | None:
    """Codes of any integer type and kind of tensor; None for what is none."""
    if codes is None:
        return None
    array = np.asarray(codes)
    return array.astype(np.int64, copy=False) if np.issubdtype(array.dtype, np.integer) else None
