"""Qwen3-Omni's code2wav: a causal transformer and causal convolutions, from frames of codes to sound.

A sample depends on its own frame, the one after it and those before it. Hence n frames give 555 samples less
than n times ``hop`` (with the sizes of the real checkpoint), which come with the next frame. Joined windows
with enough context on the left are therefore what one pass over the whole answer gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.options import OmniCode2WavOptions
from workers.families.find import refuse
from workers.families.qwen3_omni.speakers import Speakers
from workers.families.waves import Window
from workers.families.weights import Checkpoint


class Decoder:
    """The decoder of one checkpoint. All voices sound from the same codes: the talker has chosen already."""

    sample_rate = 24_000
    cpu_batch = 1  # what several windows need does not fit into the cache together

    def __init__(self, model: str, options: OmniCode2WavOptions, device: str) -> None:
        from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

        refuse(options, "family_options")
        checkpoint = Checkpoint(model)
        config = checkpoint.config
        self._speakers = Speakers(config, checkpoint.folder)
        config = config.code2wav_config
        self._device = device
        self._model = checkpoint.part(
            lambda: modeling.Qwen3OmniMoeCode2Wav._from_config(config),
            "code2wav.",
            device=device,
            dtype=checkpoint.dtype(options.dtype, device),
        )
        self.codebooks = config.num_quantizers
        self.codes = config.codebook_size
        self.hop = int(self._model.total_upsample)

    def voice(self, name: str | None) -> str:
        """See :class:`workers.families.waves.Decoder`."""
        return self._speakers.name(name)

    def decode(self, windows: Sequence[Window]) -> list[NDArray[np.float32]]:
        """See :class:`workers.families.waves.Decoder`."""
        codes = torch.from_numpy(np.stack([window.codes for window in windows])).to(self._device)
        with torch.inference_mode():
            waves = self._model(codes)[:, 0].float().cpu().numpy()
        return list(waves)
