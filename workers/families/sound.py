"""A clip to log-mel frames, as transformers' WhisperFeatureExtractor makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.families.media import refused


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

    def __call__(self, clip: NDArray[np.float32]) -> NDArray[np.float32]:
        """Mono at the extractor's rate, float32 [n] -> [mel bins, frames].

        Raises ItemError (400) for a clip longer than the model was made for.
        """
        extractor = self._extractor
        if len(clip) > extractor.n_samples:
            longest, seconds = (n / extractor.sampling_rate for n in (extractor.n_samples, len(clip)))
            raise refused(f"audio: {seconds:.0f} s long; the model takes {longest:.0f} s a clip")
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
