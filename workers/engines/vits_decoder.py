"""Engine ``vits-decoder``: the decoder half of a VITS voice, from windows of latent frames to a waveform.

Windows of equal length share a pass. ONNX Runtime's CPU convolutions take the items of a batch one by one,
so the samples are the same, bit by bit, in any company. A new attempt goes on with the first window whose
audio is not out yet.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.chunk import Payload
from workers.batching import BatchingEngine
from workers.engine import OUT, ItemError, Job
from workers.engines.vits import Voice, finite, open_session, open_voice

Array = NDArray[np.float32]


class VitsDecoderEngine(BatchingEngine[Array, Array]):
    """Windows {"frames": float32 [channels, n], "left", "right"} in, {"audio", "sample_rate"} out."""

    _voice: Voice
    _session: Any

    def load(self) -> None:
        """Opens the voice. Raises RuntimeError naming the extra to install when a library is missing."""
        folder, self._voice = open_voice(self.stage)
        self._session = open_session(folder / "decoder.onnx", self.stage, self.device)

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """Decodes each window as it comes; the windows' audio joined is that of all frames at once."""
        number = 0
        for stream in job.inputs.values():
            async for payload in stream:
                frames, left, right = self._window(payload)
                new = frames.shape[1] - left - right
                if new <= 0:
                    continue
                if number < job.emitted:
                    yield OUT
                else:
                    decoded = await self.submit(frames)
                    audio = trimmed(decoded, left=left, new=new, right=right, hop=self._voice.hop)
                    yield {"audio": audio, "sample_rate": self._voice.audio.sample_rate}
                number += 1

    def _window(self, payload: Payload) -> tuple[Array, int, int]:
        frames, left, right = payload.get("frames"), payload.get("left", 0), payload.get("right", 0)
        channels = self._voice.channels
        if not isinstance(frames, np.ndarray) or frames.dtype != np.float32 or frames.ndim != 2:
            raise ItemError(f"frames: expected float32 [{channels}, n]")
        if len(frames) != channels:
            raise ItemError(f"frames: expected {channels} rows, got {len(frames)}: made by another voice?")
        if not isinstance(left, int) or not isinstance(right, int) or min(left, right) < 0:
            raise ItemError("left, right: expected counts of frames")
        return frames, left, right

    def key(self, item: Array) -> Hashable:
        """Equal shapes go together."""
        return item.shape

    def forward(self, items: Sequence[Array]) -> list[Array | Exception]:
        """One pass: waveforms [samples]."""
        (audio,) = self._session.run(("audio",), {"z": np.stack(items)})
        return [finite(row.reshape(-1)) for row in audio]


def trimmed(audio: Array, *, left: int, new: int, right: int, hop: int) -> Array:
    """The samples of a window's ``new`` frames.

    Counted from the real end of the audio, since a decoder may give some samples fewer than frames times
    ``hop``: a segment's first window is shorter by these, and no other.
    """
    stop = len(audio) - right * hop
    return audio[stop - new * hop if left else 0 : stop]
