"""FLUX's text encoders: T5 for each word, CLIP for the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pipelines.options import DiffusionTextOptions
from workers.engines.diffusion.family import NEGATIVE, POSITIVE, Conditions, Prompt, Request, TextEncoder
from workers.families.flux.wishes import FluxWishes
from workers.families.parts import Parts


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of its own."""

    #: T5's tokens; the transformer reads all of them, filling too. 256 is what "schnell" was made for
    max_sequence_length: Annotated[int, Meta(ge=1, le=512)] = 512


class Text(TextEncoder):
    """Prompts to {"embeds": [max_sequence_length, hidden], "pooled": [hidden]}."""

    wishes = FluxWishes

    def __init__(self, model: str, options: DiffusionTextOptions, device: str) -> None:
        super().__init__(model, options, device)
        self._length = msgspec.convert(options.family_options, TextOptions).max_sequence_length
        parts = Parts(model, device=device, dtype=options.dtype)
        self._clip, self._clip_tokenizer = parts.module("text_encoder"), parts.plain("tokenizer")
        self._t5, self._t5_tokenizer = parts.module("text_encoder_2"), parts.plain("tokenizer_2")

    def prompts(self, request: Request) -> Sequence[Prompt]:
        """A negative prompt counts where ``true_cfg_scale`` is above 1."""
        assert isinstance(request.wishes, FluxWishes)
        prompts = [Prompt(POSITIVE, request.payload["prompt"])]
        negative = request.payload.get("negative_prompt")
        if negative is not None and request.wishes.cfg > 1:
            prompts.append(Prompt(NEGATIVE, negative))
        return prompts

    def encode(self, prompts: Sequence[Prompt]) -> list[Conditions]:
        """One pass, every prompt in the same length; longer ones are cut. T5's filling is not masked."""
        texts = [prompt.text for prompt in prompts]
        words = self._t5(_ids(self._t5_tokenizer, texts, self._length).to(self._t5.device))[0]
        clip = _ids(self._clip_tokenizer, texts, self._clip_tokenizer.model_max_length)
        pooled = self._clip(clip.to(self._clip.device)).pooler_output
        both = zip(words.cpu(), pooled.cpu(), strict=True)
        return [{"embeds": embeds, "pooled": whole} for embeds, whole in both]


def _ids(tokenizer: Any, texts: list[str], length: int) -> Any:
    """[texts, length]"""
    read = tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return read.input_ids
