"""Which of Wan 2.2's checkpoints it is, and what films it makes.

A14B comes in two forms, one that makes films of text and one that goes on from a picture: its transformers
get the picture's latents as further channels. The 5B model does both: a given picture stands in the first
latent frame, whose timestep is 0 while the others' falls.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta

from workers.engine import ItemError
from workers.engines.diffusion.family import Wishes
from workers.families.parts import Parts

#: What diffusers' pipelines take where they are told nothing.
HEIGHT, WIDTH, FRAMES, STEPS, GUIDANCE = 480, 832, 81, 50, 5.0

PICTURE = "input_reference"  #: the callers' name for it


class FilmWishes(Wishes, frozen=True, kw_only=True):
    """A request's parameters."""

    #: Of the second transformer. None: ``guidance_scale``
    guidance_scale_2: Annotated[float, Meta(ge=0)] | None = None


class Shape(NamedTuple):
    """A film's."""

    frames: int
    height: int  #: pixels
    width: int


class Form:
    """What the configuration of a checkpoint says.

    Args:
        parts: The checkpoint.
    """

    def __init__(self, parts: Parts) -> None:
        vae, transformer = parts.config("vae"), parts.config("transformer")
        self.channels: int = vae["z_dim"]  #: of the latents
        self.shrinks: int = vae.get("scale_factor_spatial") or 8  #: pixels of a latent's edge
        self.frames: int = vae.get("scale_factor_temporal") or 4  #: of a latent one; the first has 1
        self.patch: int = transformer["patch_size"][1]  #: latents of a token's edge
        #: Each token has a timestep of its own, and a picture stands in the first frame (5B).
        self.expands = bool(parts.index.get("expand_timesteps"))
        #: A picture comes as further channels, and must be there (A14B, "I2V").
        self.appends = transformer["in_channels"] > self.channels
        self.fps = 24.0 if self.expands else 16.0

    def shape(self, wishes: Wishes) -> Shape:
        """What is asked for. Raises ItemError (400)."""
        multiple = self.shrinks * self.patch
        height, width = wishes.height or HEIGHT, wishes.width or WIDTH
        for name, value in (("height", height), ("width", width)):
            if value % multiple:
                raise ItemError(
                    f"size: the {name} of {value} pixels is no multiple of {multiple}",
                    status=400,
                    param="size",
                )
        frames = wishes.num_frames or FRAMES
        if frames % self.frames != 1:
            raise ItemError(
                f"num_frames: {frames} is no multiple of {self.frames} and 1 more",
                status=400,
                param="num_frames",
            )
        return Shape(frames, height, width)

    def latent(self, shape: Shape) -> tuple[int, int, int]:
        """The latents' frames, height and width."""
        frames = (shape.frames - 1) // self.frames + 1
        return frames, shape.height // self.shrinks, shape.width // self.shrinks

    def check_pictures(self, number: int) -> None:
        """Raises ItemError (400) for pictures that the model has no use for, or for the lack of one."""
        if number == 0 and self.appends:
            raise ItemError(
                f"{PICTURE}: this model goes on from a picture, send one", status=400, param=PICTURE
            )
        if number and not (self.appends or self.expands):
            raise ItemError(f"{PICTURE}: this model makes films of text alone", status=400, param=PICTURE)
        if number > 1:
            raise ItemError(
                f"{PICTURE}: a film begins with one picture, not {number}", status=400, param=PICTURE
            )
