"""What a request may wish of the painter, and what it gets when it wishes nothing."""

from __future__ import annotations

from workers.engines.diffusion.family import Wishes

SIZE = 64  #: pixels of both edges; it knows no other
STEPS = 20
GUIDANCE = 2.0


class PainterWishes(Wishes, frozen=True):
    """The parameters of all families."""

    @property
    def guidance(self) -> float:
        """The scale of guidance; 1 and less: none."""
        return GUIDANCE if self.guidance_scale is None else self.guidance_scale
