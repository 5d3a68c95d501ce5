"""Qwen-Image's transformer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from adapters.chunk import Payload
from pipelines.options import DiffusionOptions
from workers.engine import ItemError
from workers.engines.diffusion.family import (
    NEGATIVE,
    POSITIVE,
    Canvas,
    Conditions,
    Row,
    Wishes,
    conditions_of,
    latents_of,
    timesteps_of,
)
from workers.engines.diffusion.tensors import as_tensor, noise
from workers.families.one_transformer import OneTransformer
from workers.families.packed import pack, shifted, unpack
from workers.families.qwen_image.form import STEPS, Form, QwenImageWishes, Size


class QwenImage(OneTransformer):
    """Latents are packed: [1, patches, channels x 4]. Given pictures' stand behind them in each pass."""

    wishes = QwenImageWishes

    def __init__(self, model: str, options: DiffusionOptions, device: str) -> None:
        super().__init__(model, options, device)
        self._form = Form(self._parts)
        for setting in ("guidance_embeds", "use_additional_t_cond"):
            if self._transformer.config.get(setting):
                raise ValueError(f"{model}: the transformer has {setting}, which is not known here")

    def begin(self, inputs: Mapping[str, list[Payload]], wishes: Wishes, seed: int) -> Canvas:
        """Inputs: "text", and "picture" with what the VAE made of given pictures."""
        assert isinstance(wishes, QwenImageWishes)
        pictures = inputs.get("picture", [])
        given = [Size(*size) for size in pictures[0]["sizes"]] if pictures else []
        size = self._form.size(wishes, given)
        device, dtype = self._transformer.device, self._transformer.dtype
        channels = self._transformer.config.in_channels // 4
        latents = pack(noise((1, channels, *size), seed, device, dtype))
        extras = {"sizes": (size, *given)}
        if pictures:
            extras["given"] = as_tensor(pictures[0]["latents"])[None].to(latents, copy=True)
        conditions = conditions_of(inputs["text"], device, dtype)
        self._check(conditions, extras["sizes"])
        return Canvas(
            latents,
            shifted(self._template, wishes.num_inference_steps or STEPS, latents.shape[1], device),
            conditions,
            wishes.cfg,
            extras=extras,
        )

    def _check(self, conditions: Mapping[str, Conditions], sizes: Sequence[Size]) -> None:
        """A prompt's rows stand behind the pictures', and there are so many places and no more.

        What had none would break each pass that it shares with others. Raises ItemError (400).
        """
        rope = self._transformer.pos_embed
        # Pictures count from their middle to both sides, in patches of 2 x 2 latents.
        places = len(rope.pos_freqs) - max(max(size) for size in sizes) // 2 // 2
        for branch, name in ((POSITIVE, "prompt"), (NEGATIVE, "negative_prompt")):
            tokens = conditions[branch]["embeds"].shape[1] if branch in conditions else 0
            if tokens > places:
                raise ItemError(
                    f"{name}: {tokens} tokens with its pictures; the model has places for {places}",
                    status=400,
                    param=name,
                )

    def key(self, row: Row) -> Hashable:
        """Prompts of any length share a pass."""
        sizes: tuple[Size, ...] = row.canvas.extras["sizes"]
        return sizes

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """[rows, patches, channels x 4]"""
        extras = rows[0].canvas.extras
        latents = latents_of(rows)
        patches = latents.shape[1]
        if "given" in extras:
            latents = torch.cat([latents, torch.cat([row.canvas.extras["given"] for row in rows])], 1)
        embeds, mask = _filled(rows)
        said: torch.Tensor = self._transformer(
            hidden_states=latents,
            timestep=timesteps_of(rows).to(latents.dtype) / 1000,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, size.height // 2, size.width // 2) for size in extras["sizes"]]] * len(rows),
            return_dict=False,
        )[0]
        return said[:, :patches]

    def guide(self, canvas: Canvas, said: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Classifier-free guidance, each patch as long a vector as without it."""
        guided = super().guide(canvas, said)
        if NEGATIVE not in said:
            return guided
        norm = torch.linalg.vector_norm
        return guided * (norm(said[POSITIVE], dim=-1, keepdim=True) / norm(guided, dim=-1, keepdim=True))

    def picture(self, canvas: Canvas, latents: torch.Tensor) -> Payload:
        """Unpacked, float32 [channels, height, width]."""
        return super().picture(canvas, unpack(latents, *canvas.extras["sizes"][0]))


def _filled(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The prompts [rows, tokens, hidden], filled up with zeros, and which tokens are theirs; None: all."""
    embeds = [row.conditions["embeds"] for row in rows]
    lengths = [each.shape[1] for each in embeds]
    longest = max(lengths)
    if min(lengths) == longest:
        return torch.cat(embeds), None
    filled = [torch.nn.functional.pad(each, (0, 0, 0, longest - each.shape[1])) for each in embeds]
    device = embeds[0].device
    mask = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
    return torch.cat(filled), mask
