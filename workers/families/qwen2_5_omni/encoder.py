"""Qwen2.5-Omni's towers: sound at 25 rows a second, pictures and films at one row for four patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adapters.chunk import Payload
from pipelines.options import OmniEncoderOptions
from workers.families.media import Medium, refused
from workers.families.pixels import Cutter, joined
from workers.families.sound import MelFrames
from workers.families.weights import Checkpoint

#: Pixels of a picture, where the checkpoint says nothing.
_IMAGE = (56 * 56, 14 * 14 * 4 * 1280)
#: Pixels of a film's frame: the defaults of transformers' Qwen2_5OmniProcessor, which no checkpoint changes.
_VIDEO = (128 * 28 * 28, 768 * 28 * 28)


class Encoder:
    """The audio and the vision tower of one checkpoint."""

    def __init__(self, model: str, options: OmniEncoderOptions, device: str) -> None:
        from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

        checkpoint = Checkpoint(model)
        config = checkpoint.config.thinker_config
        self._device = device
        self._dtype = checkpoint.dtype(options.dtype, device)
        place = {"device": device, "dtype": self._dtype}
        self._audio = checkpoint.part(
            lambda: modeling.Qwen2_5OmniAudioEncoder(config.audio_config),
            "thinker.audio_tower.",
            **place,
        )
        self._vision = checkpoint.part(
            lambda: modeling.Qwen2_5OmniVisionEncoder(config.vision_config),
            "thinker.visual.",
            **place,
        )
        self._mel = MelFrames(checkpoint.folder)
        self._cutter = Cutter(checkpoint.folder, options, image=_IMAGE, video=_VIDEO)

    def encode(self, kind: str, media: Sequence[Medium]) -> list[Payload]:
        """See :class:`workers.families.media.Encoder`."""
        import torch

        with torch.inference_mode():
            return self._sounds(media) if kind == "audio" else self._pictures(kind, media)

    def _sounds(self, clips: Sequence[Medium]) -> list[Payload]:
        import torch

        mels = [torch.from_numpy(self._frames(clip)) for clip in clips]
        lengths = torch.tensor([mel.shape[1] for mel in mels], device=self._device)
        rows = [rows_of(mel.shape[1]) for mel in mels]
        features = torch.cat(mels, 1).to(self._device, self._dtype)
        encoded = self._audio(features, feature_lens=lengths).last_hidden_state
        return [{"embeds": part.cpu()} for part in encoded.split(rows)]

    def _frames(self, clip: Medium) -> Any:
        frames = self._mel(clip.data)
        if rows_of(frames.shape[1]) < 1:
            raise refused(f"audio: {len(clip.data) / 16:.0f} ms are too short to be heard")
        return frames

    def _pictures(self, kind: str, media: Sequence[Medium]) -> list[Payload]:
        cuts = self._cutter.cut(kind, media)
        values, grids = joined(cuts, device=self._device, dtype=self._dtype)
        encoded = self._vision(values, grid_thw=grids).pooler_output
        parts = encoded.split([self._cutter.rows(cut) for cut in cuts])
        return [
            {"embeds": part.cpu(), **self._cutter.facts(kind, medium, cut)}
            for part, cut, medium in zip(parts, cuts, media, strict=True)
        ]


def rows_of(frames: int) -> int:
    """Rows that the audio tower makes of so many mel frames: a convolution and a pooling, two to one each."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1
