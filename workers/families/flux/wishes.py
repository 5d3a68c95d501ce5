"""What a request may ask of FLUX."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from workers.engines.diffusion.family import Wishes

#: What diffusers' pipeline takes where it is told nothing.
SIZE, STEPS, GUIDANCE, TRUE_CFG = 1024, 28, 3.5, 1.0


class FluxWishes(Wishes, frozen=True, kw_only=True):
    """A request's parameters. ``guidance_scale`` is what the transformer is told ("schnell" isn't)."""

    #: Of guidance by a negative prompt, which doubles the work; None, or 1 and less: none
    true_cfg_scale: Annotated[float, Meta(ge=0, le=100)] | None = None

    @property
    def cfg(self) -> float:
        """The scale of guidance by a negative prompt."""
        return TRUE_CFG if self.true_cfg_scale is None else self.true_cfg_scale
