"""Wan 2.2's transformers: one for the noisy steps and one for the rest, or one for all."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from adapters.chunk import Payload
from pipelines.options import DiffusionOptions
from workers.engine import ItemError
from workers.engines.diffusion.family import (
    Canvas,
    Denoiser,
    Row,
    Wishes,
    conditions_of,
    latents_of,
    stacked,
    timesteps_of,
)
from workers.engines.diffusion.schedule import scheduler_for
from workers.engines.diffusion.tensors import as_tensor, noise
from workers.families.find import refuse
from workers.families.parts import Parts
from workers.families.wan2_2.form import GUIDANCE, STEPS, FilmWishes, Form


class Film(Denoiser):
    """Latents [1, channels, frames, height, width]."""

    wishes = FilmWishes

    def __init__(self, model: str, options: DiffusionOptions, device: str) -> None:
        super().__init__(model, options, device)
        refuse(options, "family_options")
        parts = Parts(model, device=device, dtype=options.dtype)
        self._form = Form(parts)
        self._experts = [parts.module(name) for name in ("transformer", "transformer_2") if parts.has(name)]
        self.transformers = self._experts
        self._template = parts.plain("scheduler")
        share = parts.index.get("boundary_ratio")
        #: Below this timestep the second transformer takes over.
        self._boundary = None if share is None else share * self._template.config.num_train_timesteps

    def begin(self, inputs: Mapping[str, list[Payload]], wishes: Wishes, seed: int) -> Canvas:
        """Inputs: "text", and "picture" with what the VAE made of one."""
        assert isinstance(wishes, FilmWishes)
        form = self._form
        shape = form.shape(wishes)
        pictures = inputs.get("picture", [])
        form.check_pictures(len(pictures))
        scale = GUIDANCE if wishes.guidance_scale is None else wishes.guidance_scale
        second = scale if wishes.guidance_scale_2 is None else wishes.guidance_scale_2
        if wishes.guidance_scale_2 is not None and self._boundary is None:
            raise ItemError(
                "guidance_scale_2: this model has one transformer", status=400, param="guidance_scale_2"
            )
        device = torch.device(self.device)
        latents = noise((1, form.channels, *form.latent(shape)), seed, device, torch.float32)
        extras = {"fps": wishes.fps or form.fps, "second": second}
        if pictures:
            extras["given"] = self._given(as_tensor(pictures[0]["latents"]), latents)
        return Canvas(
            latents,
            scheduler_for(
                self._template, device=device, num_inference_steps=wishes.num_inference_steps or STEPS
            ),
            conditions_of(inputs["text"], device, self._experts[0].dtype),
            scale,
            extras=extras,
        )

    def _given(self, encoded: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """What the transformer is given of a picture.

        Where pictures are appended: a mask of the frames that are there, 4 channels for the frames of each
        latent one, and the latents of the whole film with the others black. Else the first frame's latents.
        """
        encoded = encoded[None].to(latents)
        if not self._form.appends:
            return encoded
        there = torch.zeros_like(latents[:, : self._form.frames])
        there[:, :, 0] = 1
        return torch.cat([there, encoded], 1)

    def key(self, row: Row) -> Hashable:
        """The expert, too; and whether there is a picture, which changes the inputs' shape."""
        return super().key(row), self._expert(row.canvas), "given" in row.canvas.extras

    def _expert(self, canvas: Canvas) -> int:
        return int(self._boundary is not None and float(canvas.timestep) < self._boundary)

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """[rows, channels, frames, height, width]"""
        transformer = self._experts[self._expert(rows[0].canvas)]
        latents, timesteps = latents_of(rows), timesteps_of(rows)
        given = [row.canvas.extras["given"] for row in rows if "given" in row.canvas.extras]
        if given and self._form.appends:
            latents = torch.cat([latents, torch.cat(given)], 1)
        elif given:
            latents = torch.cat([torch.cat(given), latents[:, :, 1:]], 2)
        if self._form.expands:
            timesteps = self._each_token(timesteps, latents, first=0.0 if given else 1.0)
        said: torch.Tensor = transformer(
            hidden_states=latents.to(transformer.dtype),
            timestep=timesteps,
            encoder_hidden_states=stacked(rows, "embeds"),
            return_dict=False,
        )[0]
        return said

    def _each_token(self, timesteps: torch.Tensor, latents: torch.Tensor, *, first: float) -> torch.Tensor:
        """[rows] -> [rows, tokens]; those of the first frame times ``first``."""
        _, _, frames, height, width = latents.shape
        share = torch.ones(frames, height // self._form.patch * (width // self._form.patch))
        share[0] = first
        return share.flatten().to(latents.device)[None] * timesteps[:, None]

    def scale(self, canvas: Canvas) -> float:
        """The second transformer may have one of its own."""
        second: float = canvas.extras["second"]
        return second if self._expert(canvas) else super().scale(canvas)

    def picture(self, canvas: Canvas, latents: torch.Tensor) -> Payload:
        """With "fps". A first frame that was given stays what it was."""
        given = canvas.extras.get("given")
        if given is not None and self._form.expands:
            latents = torch.cat([given, latents[:, :, 1:]], 2)
        return {**super().picture(canvas, latents), "fps": canvas.extras["fps"]}
