"""Wan 2.2's text encoder, UMT5."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.options import DiffusionTextOptions
from workers.engines.diffusion.family import NEGATIVE, POSITIVE, Conditions, Prompt, Request, TextEncoder
from workers.families.find import refuse
from workers.families.parts import Parts
from workers.families.wan2_2.form import GUIDANCE

#: Tokens that the transformer looks at; shorter prompts are filled with rows of zeros.
LENGTH = 512


class Text(TextEncoder):
    """Prompts to {"embeds": [512, hidden]}."""

    def __init__(self, model: str, options: DiffusionTextOptions, device: str) -> None:
        super().__init__(model, options, device)
        refuse(options, "family_options")
        # diffusers cleans prompts with ftfy and html, as the training texts were.
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        self._clean = prompt_clean
        parts = Parts(model, device=device, dtype=options.dtype)
        self._tokenizer = parts.plain("tokenizer")
        self._encoder = parts.module("text_encoder")

    def prompts(self, request: Request) -> Sequence[Prompt]:
        """There is guidance above a scale of 1; no negative prompt is an empty one."""
        scale = request.wishes.guidance_scale
        texts = [Prompt(POSITIVE, request.payload["prompt"])]
        if (GUIDANCE if scale is None else scale) > 1:
            texts.append(Prompt(NEGATIVE, request.payload.get("negative_prompt") or ""))
        return texts

    def encode(self, prompts: Sequence[Prompt]) -> list[Conditions]:
        """One pass, every prompt in the same length."""
        read = self._tokenizer(
            [self._clean(prompt.text) for prompt in prompts],
            padding="max_length",
            max_length=LENGTH,
            truncation=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = read.attention_mask.to(self._encoder.device)
        hidden = self._encoder(read.input_ids.to(mask.device), mask).last_hidden_state
        return [{"embeds": embeds} for embeds in (hidden * mask[..., None]).cpu()]
