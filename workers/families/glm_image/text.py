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
_AT_ONCE = 4096  #: bytes of a pass, with filling: what it takes grows with these times the longest one's


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
        """Prompt by prompt: whether the number of its words is even decides what they are."""
        return [{"words": self._encoded(quoted(prompt.text))} for prompt in prompts]

    def _encoded(self, words: list[str]) -> torch.Tensor:
        read: list[list[int]] = self._tokenizer(words, max_length=_LONGEST, truncation=True).input_ids
        pad = self._tokenizer.pad_token_id
        # With an even number of words each gets one token of filling before it, which counts as read.
        ids = [[pad] * ((len(words) + 1) % 2) + word for word in read]
        return torch.cat([self._hidden(batch) for batch in batches(ids, _AT_ONCE)])

    def _hidden(self, ids: list[list[int]]) -> torch.Tensor:
        """One pass: the rows of all words, without those of their filling."""
        pad, longest = self._tokenizer.pad_token_id, max(map(len, ids))
        device = self._encoder.device
        mask = torch.tensor([[1] * len(word) + [0] * (longest - len(word)) for word in ids], device=device)
        filled = torch.tensor([word + [pad] * (longest - len(word)) for word in ids], device=device)
        hidden: torch.Tensor = self._encoder(filled, attention_mask=mask).last_hidden_state
        return hidden[mask.bool()].cpu()


def batches(words: Sequence[list[int]], most: int) -> list[list[list[int]]]:
    """The words in order, as few batches as hold at most so many tokens each once all are filled up.

    A prompt may have thousands of words and one that is long: filled up together they are gigabytes.
    """
    made: list[list[list[int]]] = []
    longest = 0
    for word in words:
        longest = max(longest, len(word))
        if made and longest * (len(made[-1]) + 1) <= most:
            made[-1].append(word)
        else:
            made.append([word])
            longest = len(word)
    return made


def quoted(text: str) -> list[str]:
    """The words in quotation marks; one empty one where there are none."""
    return [word for pattern in _QUOTED for word in re.findall(pattern, text)] or [""]
