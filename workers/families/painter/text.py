"""The painter's thinker: what a small language model has made of a prompt after its first layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from pipelines import models
from pipelines.options import DiffusionTextOptions
from workers.engines.diffusion.family import NEGATIVE, POSITIVE, Conditions, Prompt, Request, TextEncoder
from workers.families.painter.wishes import PainterWishes


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of its own; the denoiser's weights are trained for the defaults."""

    layers: Annotated[int, Meta(ge=1)] = 4  #: how many of the model's layers run
    max_tokens: Annotated[int, Meta(ge=1, le=1024)] = 24  #: of a prompt; a longer one is cut


class Thinker(TextEncoder):
    """Prompts to {"embeds": [max_tokens, hidden], "pooled": [hidden]}.

    The rows are hidden states of the tokens; after the last token come zeros. "pooled" is their mean.
    """

    wishes = PainterWishes

    def __init__(self, model: str, options: DiffusionTextOptions, device: str) -> None:
        super().__init__(model, options, device)
        settings = msgspec.convert(options.family_options, TextOptions)
        self._states = States(model, settings.layers, settings.max_tokens, device=device, dtype=options.dtype)

    def prompts(self, request: Request) -> Sequence[Prompt]:
        """The prompt, and where guidance is above 1 what to be led away from, which may be nothing."""
        assert isinstance(request.wishes, PainterWishes)
        prompts = [Prompt(POSITIVE, request.payload["prompt"])]
        if request.wishes.guidance > 1:
            prompts.append(Prompt(NEGATIVE, request.payload.get("negative_prompt") or ""))
        return prompts

    def encode(self, prompts: Sequence[Prompt]) -> list[Conditions]:
        """One pass."""
        embeds, pooled = self._states([prompt.text for prompt in prompts])
        return [
            {"embeds": rows, "pooled": mean} for rows, mean in zip(embeds.cpu(), pooled.cpu(), strict=True)
        ]


class States:
    """The first layers of a decoder of transformers.

    Args:
        model: A model of the catalogue, a folder or a Hugging Face id.
        layers: How many.
        max_tokens: Of a text; a longer one is cut.
        device: Where they run.
        dtype: As in the engine's options.
    """

    def __init__(self, model: str, layers: int, max_tokens: int, *, device: str, dtype: str = "auto") -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = models.ensure(model)
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        decoder = AutoModel.from_pretrained(folder, num_hidden_layers=layers, dtype=getattr(torch, dtype))
        # The last norm is made for the state after all layers.
        decoder.norm = torch.nn.Identity()
        self._decoder: Any = decoder.to(device).requires_grad_(False).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._max_tokens = max_tokens

    def __call__(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [texts, max_tokens, hidden] and their means [texts, hidden]."""
        ids, lengths = self._ids(texts)
        with torch.inference_mode():
            # No token sees those after it, so the filling needs no mask.
            states = self._decoder(ids.to(self._decoder.device), use_cache=False).last_hidden_state[:, 1:]
            filled = (torch.arange(self._max_tokens) < lengths[:, None])[:, :, None].to(states)
            rows = states * filled
            return rows, rows.sum(1) / filled.sum(1).clamp(min=1)

    def _ids(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [texts, 1 + max_tokens] and how many each text has, [texts].

        Every text begins with the same token, whose state is dropped again: decoders use their first one as a
        place to look at when nothing matters. All texts are filled up to one length, so that what one becomes
        does not hang on the others.
        """
        first = self._tokenizer.bos_token_id
        ids = torch.full((len(texts), self._max_tokens + 1), first)
        lengths = torch.zeros(len(texts), dtype=torch.long)
        for row, text in enumerate(texts):
            tokens = self._tokenizer(text, add_special_tokens=False).input_ids[: self._max_tokens]
            ids[row, 1 : len(tokens) + 1] = torch.tensor(tokens, dtype=torch.long)
            lengths[row] = len(tokens)
        return ids, lengths
