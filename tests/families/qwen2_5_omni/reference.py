"""transformers' own Qwen2.5-Omni on the same weights: what each stage has to equal.

Its processor needs torchvision, which does not go with the CPU build of torch. So its parts are used: its
placeholders, its tokenizer, its feature extractor. Pictures are prepared by our own code, which has a test of
its own (``test_encoder``).

One thing is put right. From 5.x on ``generate`` drops an attention mask that is all ones. The talker looks at
whether there is one to know that it has to add the codec's tokens to its prompt and to place the rows of
media, and so does neither for a single request, though it does for the rows of a padded batch. Here it keeps
its mask; ``test_talker`` shows that a padded batch, untouched, gives the same codes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from adapters.chunk import Payload
from tests.families.qwen3_omni.reference import FILM_PIXELS
from workers.families.pixels import Vision, patches
from workers.families.qwen2_5_omni.code2wav import noise_of

#: Pixels of a picture, as the small model's settings say, and of a film's frame, as these tests' stages do.
_PIXELS = {"image": (56 * 56, 112 * 112), "video": FILM_PIXELS}
_PARTS = {"audio": "audio", "image": "images", "video": "videos"}


class Answer(NamedTuple):
    text: list[int]
    codes: list[int]
    wave: NDArray[np.float32]


class Reference:
    """The whole model, greedy, one request at a time."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from transformers import AutoTokenizer, Qwen2_5OmniForConditionalGeneration, WhisperFeatureExtractor

        self.model: Any = Qwen2_5OmniForConditionalGeneration.from_pretrained(folder).to(device)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._mel: Any = WhisperFeatureExtractor.from_pretrained(folder)
        talker = self.model.config.talker_config
        self._stops = [talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id]

    def inputs(self, request: Payload) -> dict[str, Any]:
        """What the processor would give ``generate``; films with a sound of their own have it inside."""
        from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor

        order = [p for m in request["messages"] if isinstance(m["content"], list) for p in m["content"]]
        inside = any("audio" in part for part in order)
        clips = []  # in the order in which the model hears them
        for part in order:
            if part["type"] == "audio":
                clips.append(request["audio"][part["index"]])
            elif "audio" in part:
                clips.append(request["audio"][part["audio"]])
        media: dict[str, Any] = {}
        grids: dict[str, list[Any]] = {"image": [], "video": []}
        lengths: list[int] = []
        if clips:
            heard = self._mel(
                clips,
                sampling_rate=16_000,
                padding="max_length",
                return_attention_mask=True,
                return_tensors="pt",
            )
            mask = heard["attention_mask"]
            media |= {"input_features": heard["input_features"], "feature_attention_mask": mask}
            lengths = [((n - 1) // 2 + 1 - 2) // 2 + 1 for n in mask.sum(-1).tolist()]
        # "thinker_": else ``generate`` hands the pixels to the talker too, which refuses them.
        for kind, values in (("image", "thinker_pixel_values"), ("video", "thinker_pixel_values_videos")):
            frames = [request[_PARTS[kind]][p["index"]] for p in order if p["type"] == kind]
            cut = [patches(f if f.ndim == 4 else f[None], Vision(), _PIXELS[kind]) for f in frames]
            if cut:
                grids[kind] = [torch.tensor(c.grid) for c in cut]
                media[values] = torch.cat([c.values for c in cut])
                media[f"{kind}_grid_thw"] = torch.stack(grids[kind])
        films = [p["index"] for p in order if p["type"] == "video"]
        seconds = [2 / request["video_fps"][film] for film in films]
        if films:
            media["video_second_per_grid"] = torch.tensor(seconds)
            media["use_audio_in_video"] = inside
        stand_in = SimpleNamespace(
            **{f"{name}_token": self.tokenizer.__getattr__(f"{name}_token") for name in _TOKENS},
            image_processor=SimpleNamespace(merge_size=2),
            video_processor=SimpleNamespace(merge_size=2),
            get_chunked_index=lambda *a: Qwen2_5OmniProcessor.get_chunked_index(None, *a),
        )
        text = self.tokenizer.apply_chat_template(
            request["messages"], tokenize=False, add_generation_prompt=True
        )
        (text,) = Qwen2_5OmniProcessor.replace_multimodal_special_tokens(
            stand_in,
            [text],
            iter(lengths),
            iter(grids["image"]),
            iter(grids["video"]),
            video_second_per_grid=iter(seconds),
            use_audio_in_video=inside,
            position_id_per_seconds=25,
            seconds_per_chunk=2.0,
        )
        ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **media}

    def answer(
        self, request: Payload, tokens: int, frames: int, *, seed: int = 1, voice: str = "Chelsie"
    ) -> Answer:
        """Greedy, in one piece."""
        inputs = self.inputs(request)
        codes: list[int] = []
        generate = self.model.talker.generate

        def listen(**kwargs: Any) -> Any:
            made = generate(**kwargs)
            codes.extend(made[0, kwargs["input_ids"].shape[1] :].tolist())
            return made

        self.model.talker.generate = listen
        prepare = self.model.talker.prepare_inputs_for_generation

        @functools.wraps(prepare)
        def with_mask(*args: Any, **kwargs: Any) -> Any:
            made = prepare(*args, **kwargs)
            if made.get("attention_mask") is None:
                new = made["input_ids"] if made.get("inputs_embeds") is None else made["inputs_embeds"]
                length = made["past_key_values"].get_seq_length() + new.shape[1]
                made["attention_mask"] = torch.ones(1, length, dtype=torch.long, device=new.device)
            return made

        self.model.talker.prepare_inputs_for_generation = with_mask
        try:
            with noise(self.model, seed):
                ids, wave = self.model.generate(
                    **{k: v.to(self.model.device) if torch.is_tensor(v) else v for k, v in inputs.items()},
                    speaker=voice,
                    thinker_max_new_tokens=tokens,
                    thinker_do_sample=False,
                    talker_max_new_tokens=frames,
                    talker_do_sample=False,
                    talker_eos_token_id=self._stops,
                )
        finally:
            self.model.talker.generate = generate
            self.model.talker.prepare_inputs_for_generation = prepare
        spoken = [code for code in codes if code not in self._stops]
        return Answer(ids[0, inputs["input_ids"].shape[1] :].tolist(), spoken, wave.numpy())

    def batch(self, requests: list[Payload], tokens: int, frames: int) -> list[list[int]]:
        """Codes of conversations of text alone, by one call of ``generate`` as it is."""
        texts = [
            self.tokenizer.apply_chat_template(r["messages"], tokenize=False, add_generation_prompt=True)
            for r in requests
        ]
        inputs = self.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
        heard: list[Any] = []
        generate = self.model.talker.generate
        self.model.talker.generate = lambda **kwargs: (
            heard.append(generate(**kwargs)[:, kwargs["input_ids"].shape[1] :])
            or torch.cat([kwargs["input_ids"], heard[0]], 1)
        )
        try:
            self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                thinker_max_new_tokens=tokens,
                thinker_do_sample=False,
                talker_max_new_tokens=frames,
                talker_do_sample=False,
                talker_eos_token_id=self._stops,
            )
        finally:
            self.model.talker.generate = generate
        return [[code for code in row if code not in self._stops] for row in heard[0].tolist()]

    def wave(self, codes: list[int], *, seed: int, place: int = 0, voice: str = "Chelsie") -> Any:
        """code2wav of some codes, the first of which is the answer's ``place``-th."""
        speaker = self.model.speaker_map[voice]
        with noise(self.model, seed, place), torch.no_grad():
            return self.model.token2wav(
                torch.tensor([codes]), conditioning=speaker["cond"], reference_mel=speaker["ref_mel"]
            ).numpy()


_TOKENS = ("image", "audio", "video", "vision_bos", "vision_eos", "audio_bos", "audio_eos")


@contextmanager
def noise(model: Any, seed: int, place: int = 0) -> Iterator[None]:
    """The diffusion's noise, drawn as the stage draws it."""
    drawn: Callable[..., Any] = torch.randn

    def given(shape: Any, *rest: Any, **more: Any) -> Any:
        _, count, bins = shape
        repeats = model.config.token2wav_config.dit_config.repeats
        return torch.from_numpy(noise_of(seed, place * repeats, count, bins))[None].to(model.device)

    torch.randn = given  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.randn = drawn
