"""Qwen-Image's text encoder: Qwen2.5-VL, which also looks at the pictures of an edit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pipelines.options import DiffusionTextOptions
from workers.engine import ItemError
from workers.engines.diffusion.family import NEGATIVE, POSITIVE, Conditions, Prompt, Request, TextEncoder
from workers.families.parts import Parts
from workers.families.pixels import Vision, bounds_of, joined, patches
from workers.families.qwen_image.form import Form, QwenImageWishes, fitted

_PLACE = "<|image_pad|>"  #: where a picture's rows stand
_PICTURE = f"<|vision_start|>{_PLACE}<|vision_end|>"
_CHAT = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
#: What the model was trained to be told, and how many tokens of that, before the prompt, are then dropped.
_DRAW = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships "
    "of the objects and background:"
)
_EDIT = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then "
    "explain how the user's text instruction should alter or modify the image. Generate a new image that "
    "meets the user's requirements while maintaining consistency with the original input where appropriate."
)
_DRAW_TOLD, _EDIT_TOLD = 34, 64
_LONGEST = 512  #: tokens of a prompt without pictures, and of what follows it; the rest is cut
_BOUNDS = (56 * 56, 28 * 28 * 1280)  #: pixels of a picture, where the checkpoint says nothing


class _Read(NamedTuple):
    """A prompt, ready for the language model."""

    embeds: torch.Tensor  #: [tokens, hidden]
    positions: torch.Tensor  #: [3, tokens]


class Text(TextEncoder):
    """Prompts to {"embeds": [tokens, hidden]}; each has its own length."""

    wishes = QwenImageWishes

    def __init__(self, model: str, options: DiffusionTextOptions, device: str) -> None:
        super().__init__(model, options, device)
        parts = Parts(model, device=device, dtype=options.dtype)
        self._form = Form(parts)
        self._area = self._form.area(options)
        self._model = parts.module("text_encoder").model  # without the head
        self._tokenizer = parts.plain("tokenizer")
        self._place = self._tokenizer.convert_tokens_to_ids(_PLACE)
        if self._form.edits:
            settings = parts.config("processor", "preprocessor_config.json")
            self._vision, self._bounds = Vision.of(settings), bounds_of(settings, _BOUNDS)
        else:
            self._model.visual = None  # frees what nobody looks with

    def prompts(self, request: Request) -> Sequence[Prompt]:
        """A negative prompt counts where the scale is above 1; an empty one is one."""
        assert isinstance(request.wishes, QwenImageWishes)
        images = tuple(self._form.pictures(request))
        given = {POSITIVE: request.payload["prompt"], NEGATIVE: request.payload.get("negative_prompt")}
        if request.wishes.cfg <= 1:
            given[NEGATIVE] = None
        for name, text in zip(("prompt", "negative_prompt"), given.values(), strict=True):
            if images and text is not None and _PLACE in text:
                raise ItemError(f"{name}: {_PLACE} stands for a picture", status=400, param=name)
        return [Prompt(branch, text, images) for branch, text in given.items() if text is not None]

    def encode(self, prompts: Sequence[Prompt]) -> list[Conditions]:
        """One pass of the language model over all; pictures that prompts share are looked at once."""
        seen = {id(prompt.images): prompt.images for prompt in prompts if prompt.images}
        looks = {key: self._look(images) for key, images in seen.items()}
        reads = [self._read(prompt, looks.get(id(prompt.images))) for prompt in prompts]
        # Filling stands after a prompt, where a causal model can't see it: no mask is needed.
        longest = max(len(read.embeds) for read in reads)
        fill = [longest - len(read.embeds) for read in reads]
        pad = torch.nn.functional.pad
        hidden = self._model.language_model(
            inputs_embeds=torch.stack(
                [pad(read.embeds, (0, 0, 0, more)) for read, more in zip(reads, fill, strict=True)]
            ),
            position_ids=torch.stack(
                [pad(read.positions, (0, more)) for read, more in zip(reads, fill, strict=True)], 1
            ),
            use_cache=False,
        ).last_hidden_state
        told = _EDIT_TOLD if self._form.edits else _DRAW_TOLD
        return [
            {"embeds": rows[told : len(read.embeds)].cpu()} for rows, read in zip(hidden, reads, strict=True)
        ]

    def _look(self, images: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of all pictures, [rows, hidden], and the patches of each along time, height and width."""
        sized = [np.array(fitted(image, self._area)) for image in images]
        cuts = [patches(pixels[None], self._vision, self._bounds) for pixels in sized]
        values, grids = joined(cuts, device=self._model.device, dtype=self._model.dtype)
        return self._model.visual(values, grid_thw=grids).pooler_output, grids

    def _read(self, prompt: Prompt, look: tuple[torch.Tensor, torch.Tensor] | None) -> _Read:
        text = prompt.text
        if self._form.most == 1:
            text = _PICTURE + text
        elif look is not None:
            named = (f"Picture {number}: {_PICTURE}" for number in range(1, len(look[1]) + 1))
            text = "".join(named) + text
        told = _EDIT if self._form.edits else _DRAW
        ids = self._tokenizer(_CHAT.format(told, text)).input_ids
        if look is None:
            tokens = torch.tensor(ids[: _DRAW_TOLD + _LONGEST], device=self._model.device)
            places = torch.arange(len(tokens), device=self._model.device)
            return _Read(self._embed(tokens), places.expand(3, -1))
        rows, grids = look
        merged = [int(grid.prod()) // self._vision.merge_size**2 for grid in grids]
        tokens = torch.tensor(self._spread(ids, merged), device=self._model.device)
        pictured = tokens == self._place
        # With places in height and width, as the model was trained. diffusers 0.42 calls transformers 5 in a
        # way that loses these (it hands no mm_token_type_ids over), and pictures stand in one line there.
        positions, _ = self._model.get_rope_index(tokens[None], pictured[None].int(), image_grid_thw=grids)
        embeds = self._embed(tokens).masked_scatter(pictured[:, None], rows)
        return _Read(embeds, positions[:, 0])

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        embeds: torch.Tensor = self._model.get_input_embeddings()(tokens)
        return embeds

    def _spread(self, ids: Sequence[int], merged: Sequence[int]) -> list[int]:
        """Each picture's token as often as it has rows."""
        rest = iter(merged)
        return [token for token in ids for _ in range(next(rest) if token == self._place else 1)]
