"""Qwen3-Omni's towers: sound at 13 rows a second, pictures and films at one row for four patches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adapters.chunk import Payload
from pipelines.options import OmniEncoderOptions
from workers.families.media import Medium
from workers.families.pixels import Cutter, joined
from workers.families.sound import MelFrames
from workers.families.weights import Checkpoint

#: Pixels of a picture, where the checkpoint says nothing.
_IMAGE = (56 * 56, 28 * 28 * 1280)
#: Pixels of a film's frame: the defaults of transformers' Qwen3OmniMoeProcessor.
_VIDEO = (128 * 32 * 32, 768 * 32 * 32)


class Encoder:
    """The audio and the vision tower of one checkpoint.

    Payloads of pictures and films carry ``deepstack`` too: what the vision tower's lower layers saw, float
    [layers, n, hidden], which the thinker adds after its first layers.
    """

    def __init__(self, model: str, options: OmniEncoderOptions, device: str) -> None:
        from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

        checkpoint = Checkpoint(model)
        config = checkpoint.config.thinker_config
        self._device = device
        self._dtype = checkpoint.dtype(options.dtype, device)
        place = {"device": device, "dtype": self._dtype}
        self._audio = checkpoint.part(
            lambda: modeling.Qwen3OmniMoeAudioEncoder._from_config(config.audio_config),
            "thinker.audio_tower.",
            **place,
        )
        self._vision = checkpoint.part(
            lambda: modeling.Qwen3OmniMoeVisionEncoder._from_config(config.vision_config),
            "thinker.visual.",
            **place,
        )
        self._mel = MelFrames(checkpoint.folder, silence=False)
        self._cutter = Cutter(checkpoint.folder, options, image=_IMAGE, video=_VIDEO)

    def encode(self, kind: str, media: Sequence[Medium]) -> list[Payload]:
        """See :class:`workers.families.media.Encoder`."""
        with torch.inference_mode():
            if kind == "audio":
                return [self._sound(clip) for clip in media]
            return self._pictures(kind, media)

    def _sound(self, clip: Medium) -> Payload:
        """A pass for each clip: the tower pads the last second of a clip to that of the longest in the pass.

        So the rows of a clip would depend on its company.
        """
        frames = torch.from_numpy(self._mel(clip.data)).to(self._device, self._dtype)
        length = torch.tensor([frames.shape[1]], device=self._device)
        return {"embeds": self._audio(frames, feature_lens=length).last_hidden_state.cpu()}

    def _pictures(self, kind: str, media: Sequence[Medium]) -> list[Payload]:
        cuts = self._cutter.cut(kind, media)
        values, grids = joined(cuts, device=self._device, dtype=self._dtype)
        encoded = self._vision(values, grid_thw=grids)
        rows = [self._cutter.rows(cut) for cut in cuts]
        deep = torch.stack(encoded.deepstack_features).split(rows, 1)
        return [
            {"embeds": part.cpu(), "deepstack": layers.cpu(), **self._cutter.facts(kind, medium, cut)}
            for part, layers, cut, medium in zip(
                encoded.pooler_output.split(rows), deep, cuts, media, strict=True
            )
        ]
