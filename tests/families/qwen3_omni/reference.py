"""transformers' Qwen3OmniMoeForConditionalGeneration on requests as the gateway sends them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from adapters.chunk import Payload


class Said(NamedTuple):
    """One answer."""

    tokens: list[int]  #: of the text, the one that ends it included
    codes: np.ndarray[Any, Any]  #: [codebooks, frames]
    wave: np.ndarray[Any, Any]  #: [samples]


class Reference:
    """The whole model, loaded by transformers itself."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration, WhisperFeatureExtractor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder).to(device).eval()
        # transformers' talker looks there for the sizes of sounds, but its config has no such class.
        self.model.talker.config.audio_config = self.model.thinker.config.audio_config
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._sounds = WhisperFeatureExtractor.from_pretrained(folder)
        self._images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self._folder = folder

    def answer(self, request: Payload, *, text: int = 12, frames: int = 16, speaker: str = "ethan") -> Said:
        """Greedy in all its parts. ``text`` and ``frames`` are limits, as ``generate`` takes them."""
        import torch

        inputs, films_sound = self.inputs(request)
        heard: list[Any] = []
        hook = self.model.code2wav.register_forward_pre_hook(lambda module, args: heard.append(args[0]))
        try:
            with torch.inference_mode():
                sequences, wave = self.model.generate(
                    **{name: value.to(self.model.device) for name, value in inputs.items()},
                    use_audio_in_video=films_sound,
                    speaker=speaker,
                    thinker_max_new_tokens=text,
                    thinker_eos_token_id=self.tokenizer.eos_token_id,
                    talker_max_new_tokens=frames + 1,  # the last one is not decoded
                    talker_do_sample=False,
                )
        finally:
            hook.remove()
        tokens = sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return Said(tokens, torch.cat(heard, -1)[0].cpu().numpy(), wave.reshape(-1).cpu().numpy())

    def decoded(self, codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """One pass of code2wav: [codebooks, n] -> [samples]."""
        import torch

        with torch.inference_mode():
            wave: np.ndarray[Any, Any] = (
                self.model.code2wav(torch.from_numpy(codes).long()[None]).reshape(-1).numpy()
            )
        return wave

    def inputs(self, request: Payload) -> tuple[dict[str, Any], bool]:
        """What transformers' processor makes of a request, and whether films bring their sound.

        The processor itself can't be built here: its video half needs torchvision.
        """
        import torch

        parts = [p for m in request["messages"] if isinstance(m["content"], list) for p in m["content"]]
        films_sound = any("audio" in part for part in parts)
        clips = [
            request["audio"][part["index"] if part["type"] == "audio" else part["audio"]]
            for part in parts
            if part["type"] == "audio" or "audio" in part
        ]
        images = [request["images"][part["index"]] for part in parts if part["type"] == "image"]
        films = [part["index"] for part in parts if part["type"] == "video"]
        inputs: dict[str, Any] = {}
        if clips:
            inputs |= self._heard(clips)
        if images:
            made = self._images(images=images, return_tensors="pt")
            inputs |= {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
        if films:
            inputs |= self._films(request, films)
        text = self.tokenizer.apply_chat_template(
            request["messages"], tokenize=False, add_generation_prompt=True
        )
        text = self._expanded(text, inputs, films_sound)
        encoded = self.tokenizer([text], return_tensors="pt")
        inputs |= {"input_ids": encoded["input_ids"], "attention_mask": torch.ones_like(encoded["input_ids"])}
        return inputs, films_sound

    def _heard(self, clips: Sequence[Any]) -> dict[str, Any]:
        import torch

        made = [
            self._sounds(
                clip,
                sampling_rate=16000,
                padding=True,
                truncation=False,
                return_attention_mask=True,
                return_tensors="pt",
            )
            for clip in clips
        ]
        longest = max(one["input_features"].shape[-1] for one in made)
        features = torch.zeros(len(made), made[0]["input_features"].shape[1], longest)
        mask = torch.zeros(len(made), longest, dtype=torch.long)
        for row, one in enumerate(made):
            length = int(one["attention_mask"].sum())
            features[row, :, :length] = one["input_features"][0, :, :length]
            mask[row, :length] = 1
        return {"input_features": features, "feature_attention_mask": mask}

    def _films(self, request: Payload, films: Sequence[int]) -> dict[str, Any]:
        import torch

        from workers.families.pixels import Vision, joined, patches
        from workers.families.weights import read_json

        vision = Vision.of(read_json(self._folder / "preprocessor_config.json"))
        cuts = [patches(request["videos"][n], vision, FILM_PIXELS) for n in films]
        values, grids = joined(cuts, device="cpu", dtype=torch.float32)
        seconds = [vision.temporal_patch_size / request["video_fps"][n] for n in films]
        return {
            "pixel_values_videos": values,
            "video_grid_thw": grids,
            "video_second_per_grid": torch.tensor(seconds),
        }

    def _expanded(self, text: str, inputs: dict[str, Any], films_sound: bool) -> str:
        from transformers.models.qwen3_omni_moe import processing_qwen3_omni_moe as processing

        tokenizer = self.tokenizer
        named = {
            name: getattr(tokenizer, name)
            for name in (
                "image_token",
                "audio_token",
                "video_token",
                "vision_bos_token",
                "vision_eos_token",
                "audio_bos_token",
                "audio_eos_token",
            )
        }
        merge = SimpleNamespace(merge_size=2)
        processor = SimpleNamespace(image_processor=merge, video_processor=merge, **named)
        lengths = inputs.get("feature_attention_mask")
        sounds = [] if lengths is None else processing._get_feat_extract_output_lengths(lengths.sum(-1), 50)
        (expanded,) = processing.Qwen3OmniMoeProcessor.replace_multimodal_special_tokens(
            processor,
            [text],
            iter(int(n) for n in sounds),
            iter([one.numpy() for one in inputs.get("image_grid_thw", [])]),
            iter([one.numpy() for one in inputs.get("video_grid_thw", [])]),
            video_second_per_grid=iter([float(one) for one in inputs.get("video_second_per_grid", [])]),
            use_audio_in_video=films_sound,
            position_id_per_seconds=13.0,
            seconds_per_chunk=2.0,
        )
        return expanded


FILM_PIXELS = (32 * 32, 96 * 96)  #: bounds of a film's frame in these tests
