"""Qwen3-Omni's towers: sound at 13 rows a second, pictures and films at one row for four patches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adapters.chunk import Payload
from pipelines.options import OmniEncoderOptions
from workers.families.media import Medium, refused
from workers.families.pixels import Patches, Vision, bounds_of, joined, patches
from workers.families.sound import MelFrames
from workers.families.weights import Checkpoint, read_json

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
        settings = read_json(checkpoint.folder / "preprocessor_config.json")
        self._preprocessing = Vision.of(settings)
        own = bounds_of(settings, _IMAGE)
        self._image = options.min_pixels or own[0], options.max_pixels or own[1]
        self._video = options.video_min_pixels or _VIDEO[0], options.video_max_pixels or _VIDEO[1]

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
        seconds = len(clip.data) / 16_000
        if seconds > self._mel.longest_s:
            raise refused(f"audio: {seconds:.0f} s long; the model takes {self._mel.longest_s:.0f} s a clip")
        frames = torch.from_numpy(self._mel(clip.data)).to(self._device, self._dtype)
        length = torch.tensor([frames.shape[1]], device=self._device)
        return {"embeds": self._audio(frames, feature_lens=length).last_hidden_state.cpu()}

    def _pictures(self, kind: str, media: Sequence[Medium]) -> list[Payload]:
        cuts = [self._patches(kind, medium) for medium in media]
        values, grids = joined(cuts, device=self._device, dtype=self._dtype)
        encoded = self._vision(values, grid_thw=grids)
        rows = [len(cut.values) // self._preprocessing.merge_size**2 for cut in cuts]
        deep = torch.stack(encoded.deepstack_features).split(rows, 1)
        return [
            {"embeds": part.cpu(), "deepstack": layers.cpu(), "grid": list(cut.grid)}
            | ({"seconds_per_grid": self._span_s(medium)} if kind == "video" else {})
            for part, layers, cut, medium in zip(
                encoded.pooler_output.split(rows), deep, cuts, media, strict=True
            )
        ]

    def _patches(self, kind: str, medium: Medium) -> Patches:
        if kind == "image":
            return patches(medium.data[None], self._preprocessing, self._image)
        return patches(medium.data, self._preprocessing, self._video)

    def _span_s(self, film: Medium) -> float:
        return self._preprocessing.temporal_patch_size / film.fps
