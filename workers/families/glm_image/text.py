"""GLM-Image's encoder of words that shall stand in the picture: a T5 that reads bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from pipelines.options import DiffusionTextOptions
from workers.engine import ItemError
from workers.engines.diffusion.family import NEGATIVE, POSITIVE, Conditions, Prompt, Request, TextEncoder
from workers.families.find import refuse
from workers.families.glm_image.wishes import guided
from workers.families.parts import Parts

#: Quoted words, in the order in which diffusers looks for them.
_QUOTED = (r"'([^']*)'", "\u201c([^\u201c\u201d]*)\u201d", r'"([^"]*)"', "\u300c([^\u300c\u300d]*)\u300d")
_LONGEST = 2048  #: bytes of one of them


class Text(TextEncoder):
    """Prompts to {"words": [bytes of all words, hidden]}."""

    def __init__(self, model: str, options: DiffusionTextOptions, device: str) -> None:
        super().__init__(model, options, device)
        refuse(options, "family_options")
        parts = Parts(model, device=device, dtype=options.dtype)
        self._tokenizer = parts.plain("tokenizer")
        self._encoder = parts.module("text_encoder")

    def prompts(self, request: Request) -> Sequence[Prompt]:
        """Guidance leads away from a picture without words, and of no codes. It knows no negative prompt."""
        if request.payload.get("negative_prompt"):
            raise ItemError("negative_prompt: this model takes none", status=400, param="negative_prompt")
        prompts = [Prompt(POSITIVE, request.payload["prompt"])]
        return [*prompts, Prompt(NEGATIVE, "")] if guided(request.wishes) else prompts

    def encode(self, prompts: Sequence[Prompt]) -> list[Conditions]:
        """Prompt by prompt: the words of one are a batch, and its length decides what filling they get."""
        return [{"words": self._encoded(quoted(prompt.text))} for prompt in prompts]

    def _encoded(self, words: list[str]) -> torch.Tensor:
        read: list[list[int]] = self._tokenizer(words, max_length=_LONGEST, truncation=True).input_ids
        pad = self._tokenizer.pad_token_id
        # With an even number of words each gets one token of filling before it, which counts as read.
        ids = [[pad] * ((len(words) + 1) % 2) + word for word in read]
        longest = max(map(len, ids))
        device = self._encoder.device
        mask = torch.tensor([[1] * len(word) + [0] * (longest - len(word)) for word in ids], device=device)
        filled = torch.tensor([word + [pad] * (longest - len(word)) for word in ids], device=device)
        hidden: torch.Tensor = self._encoder(filled, attention_mask=mask).last_hidden_state
        return hidden[mask.bool()].cpu()


def quoted(text: str) -> list[str]:
    """The words in quotation marks; one empty one where there are none."""
    return [word for pattern in _QUOTED for word in re.findall(pattern, text)] or [""]
