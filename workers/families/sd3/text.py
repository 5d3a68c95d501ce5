"""SD3's text encoders: two CLIPs for the words and the whole, and T5 for the words again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipelines.options import DiffusionTextOptions
from workers.engines.diffusion.family import NEGATIVE, POSITIVE, Conditions, Prompt, Request, TextEncoder
from workers.families.find import refuse
from workers.families.parts import Parts
from workers.families.sd3.defaults import scale_of

_T5_LENGTH = 256  #: tokens of a prompt; the rest is cut


class Text(TextEncoder):
    """Prompts to {"embeds": [CLIP's tokens + 256, hidden], "pooled": [of both CLIPs]}."""

    def __init__(self, model: str, options: DiffusionTextOptions, device: str) -> None:
        super().__init__(model, options, device)
        refuse(options, "family_options")
        parts = Parts(model, device=device, dtype=options.dtype)
        self._clips = [(parts.module(f"text_encoder{n}"), parts.plain(f"tokenizer{n}")) for n in ("", "_2")]
        self._width = int(parts.config("transformer")["joint_attention_dim"])
        # T5 is the largest part and may be left out of a checkpoint; its rows are zeros then.
        self._t5 = parts.module("text_encoder_3") if parts.has("text_encoder_3") else None
        self._t5_tokenizer = parts.plain("tokenizer_3") if self._t5 is not None else None

    def prompts(self, request: Request) -> Sequence[Prompt]:
        """With guidance a negative prompt too, if only an empty one."""
        prompts = [Prompt(POSITIVE, request.payload["prompt"])]
        if scale_of(request.wishes) > 1:
            prompts.append(Prompt(NEGATIVE, request.payload.get("negative_prompt", "")))
        return prompts

    def encode(self, prompts: Sequence[Prompt]) -> list[Conditions]:
        """One pass, every prompt in the same length; longer ones are cut, and filling is not masked."""
        texts = [prompt.text for prompt in prompts]
        words, wholes = zip(*(self._clip(*clip, texts) for clip in self._clips), strict=True)
        clips = torch.cat(words, -1)
        clips = torch.nn.functional.pad(clips, (0, self._width - clips.shape[-1]))
        embeds = torch.cat([clips, self._t5_rows(texts, clips)], 1)
        both = zip(embeds.cpu(), torch.cat(wholes, -1).cpu(), strict=True)
        return [{"embeds": rows, "pooled": whole} for rows, whole in both]

    def _clip(self, encoder: Any, tokenizer: Any, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """The last layer's input, [texts, tokens, hidden], and the projected end, [texts, projection]."""
        # Both CLIPs read as many tokens as the first one's tokenizer says.
        ids = _ids(tokenizer, texts, self._clips[0][1].model_max_length).to(encoder.device)
        out = encoder(ids, output_hidden_states=True)
        return out.hidden_states[-2], out.text_embeds

    def _t5_rows(self, texts: list[str], like: torch.Tensor) -> torch.Tensor:
        """[texts, 256, hidden]"""
        if self._t5 is None:
            return like.new_zeros(len(texts), _T5_LENGTH, self._width)
        rows: torch.Tensor = self._t5(_ids(self._t5_tokenizer, texts, _T5_LENGTH).to(self._t5.device))[0]
        return rows


def _ids(tokenizer: Any, texts: list[str], length: int) -> Any:
    """[texts, length]"""
    read = tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return read.input_ids
