"""Qwen2.5-Omni's towers: sound at 25 rows a second, pictures and films at one row for four patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adapters.chunk import Payload
from pipelines.options import OmniEncoderOptions
from workers.families.media import Medium, refused
from workers.families.pixels import Patches, Vision, bounds_of, joined, patches
from workers.families.sound import MelFrames
from workers.families.weights import Checkpoint, read_json

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
        settings = read_json(checkpoint.folder / "preprocessor_config.json")
        self._preprocessing = Vision.of(settings)
        own = bounds_of(settings, _IMAGE)
        self._image = options.min_pixels or own[0], options.max_pixels or own[1]
        self._video = options.video_min_pixels or _VIDEO[0], options.video_max_pixels or _VIDEO[1]

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
        seconds = len(clip.data) / 16_000
        if seconds > self._mel.longest_s:
            raise refused(f"audio: {seconds:.0f} s long; the model takes {self._mel.longest_s:.0f} s a clip")
        frames = self._mel(clip.data)
        if rows_of(frames.shape[1]) < 1:
            raise refused(f"audio: {seconds * 1000:.0f} ms are too short to be heard")
        return frames

    def _pictures(self, kind: str, media: Sequence[Medium]) -> list[Payload]:
        cuts = [self._patches(kind, medium) for medium in media]
        values, grids = joined(cuts, device=self._device, dtype=self._dtype)
        encoded = self._vision(values, grid_thw=grids).pooler_output
        merge = self._preprocessing.merge_size**2
        parts = encoded.split([len(cut.values) // merge for cut in cuts])
        return [
            {"embeds": part.cpu(), "grid": list(cut.grid)}
            | ({"seconds_per_grid": self._span_s(medium)} if kind == "video" else {})
            for part, cut, medium in zip(parts, cuts, media, strict=True)
        ]

    def _patches(self, kind: str, medium: Medium) -> Patches:
        if kind == "image":
            return patches(medium.data[None], self._preprocessing, self._image)
        return patches(medium.data, self._preprocessing, self._video)

    def _span_s(self, film: Medium) -> float:
        return self._preprocessing.temporal_patch_size / film.fps


def rows_of(frames: int) -> int:
    """Rows that the audio tower makes of so many mel frames: a convolution and a pooling, two to one each."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1
