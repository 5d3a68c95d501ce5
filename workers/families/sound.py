"""A clip to log-mel frames, as transformers' WhisperFeatureExtractor makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class MelFrames:
    """The feature extractor of a checkpoint, without its padding.

    The extractor pads a clip with silence to a fixed length, of minutes for some models, and the model's
    processor then drops the frames that are silence only. Here a clip gets as much silence as the frames at
    its end can hear, half a transform's length, which gives the same frames in a hundredth of the time.

    Args:
        folder: The checkpoint, with ``preprocessor_config.json``.
        silence: Whether the model's processor pads at all. If not, the last frames hear the clip's end
            mirrored, and only a clip shorter than a transform gets silence.
    """

    def __init__(self, folder: Path, *, silence: bool = True) -> None:
        from transformers import WhisperFeatureExtractor

        self._silence = silence
        self._extractor: Any = WhisperFeatureExtractor.from_pretrained(folder)

    @property
    def longest_s(self) -> float:
        """What the model was made for, seconds."""
        return float(self._extractor.n_samples / self._extractor.sampling_rate)

    def __call__(self, clip: NDArray[np.float32]) -> NDArray[np.float32]:
        """Mono at the extractor's rate, float32 [n] -> [mel bins, frames]."""
        extractor = self._extractor
        hop = extractor.hop_length
        if self._silence:
            padded = -(-len(clip) // hop) * hop + -(-extractor.n_fft // hop) * hop
        else:
            padded = max(len(clip), extractor.n_fft)
        made = extractor(
            clip,
            sampling_rate=extractor.sampling_rate,
            padding="max_length",
            max_length=padded,
            return_attention_mask=True,
            return_tensors="np",
        )
        frames: NDArray[np.float32] = made["input_features"][0][:, : int(made["attention_mask"][0].sum())]
        return frames
