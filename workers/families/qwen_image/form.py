"""Which of Qwen-Image's checkpoints it is, and what may be asked of it.

There are three: one that draws, and two that edit. The first editor takes one picture, and reads it in the
size in which it draws; the later one ("Plus", 2509) takes several, and reads them smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from pipelines.options import DiffusionTextOptions, DiffusionVaeOptions
from workers.engine import ItemError
from workers.engines.diffusion.family import Request, Wishes, size_of
from workers.families.find import refuse
from workers.families.parts import Parts

#: What diffusers' pipelines take where they are told nothing.
SIZE, STEPS, GUIDANCE = 1024, 50, 4.0
_AREA, _READ_AREA = 1024 * 1024, 384 * 384  #: pixels of a given picture
_MOST = 3  #: pictures that the later editor was made for
_STEEPEST = 100  #: one side of a given picture may be so many times the other


class QwenImageWishes(Wishes, frozen=True, kw_only=True):
    """A request's parameters. ``guidance_scale`` is that of guidance by a negative prompt."""

    true_cfg_scale: Annotated[float, Meta(ge=0, le=100)] | None = None  #: diffusers' name for the same

    @property
    def cfg(self) -> float:
        """The scale of guidance by a negative prompt."""
        for scale in (self.true_cfg_scale, self.guidance_scale):
            if scale is not None:
                return scale
        return GUIDANCE


class EditOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the stages that look at given pictures; there are none where a checkpoint only draws."""

    #: Pixels that a given picture is scaled to. None: as diffusers does it, a megapixel, but for the later
    #: editor's text encoder 384 x 384
    area: Annotated[int, Meta(ge=32 * 32)] | None = None


class Size(NamedTuple):
    """A picture's, in pixels or in latents."""

    height: int
    width: int


class Form:
    """What ``model_index.json`` and the parts' configurations say.

    Raises ValueError for a checkpoint of a pipeline that isn't known here.
    """

    def __init__(self, parts: Parts) -> None:
        name = parts.index.get("_class_name")
        kinds = {"QwenImagePipeline": 0, "QwenImageEditPipeline": 1, "QwenImageEditPlusPipeline": _MOST}
        if name not in kinds:
            raise ValueError(f"the checkpoint is one of {name}; known are {', '.join(kinds)}")
        self.most = kinds[name]  #: pictures that it takes; 0: none
        #: Pixels of a latent's edge.
        self.shrinks = 2 ** len(parts.config("vae")["temperal_downsample"])

    @property
    def edits(self) -> bool:
        """Whether it takes pictures; then it needs one."""
        return self.most > 0

    def area(self, options: DiffusionTextOptions | DiffusionVaeOptions) -> int:
        """Pixels of a given picture, as this stage sees it. Raises ValueError for settings without effect."""
        if not self.edits:
            refuse(options, "family_options")
        own = msgspec.convert(options.family_options, EditOptions).area
        read = self.most > 1 and isinstance(options, DiffusionTextOptions)
        return own or (_READ_AREA if read else _AREA)

    def pictures(self, request: Request) -> list[Any]:
        """Those that came with it, uint8 [height, width, 3] each. Raises ItemError (400)."""
        images: list[Any] = list(request.payload.get("images", ()))
        for name, given in (("mask", request.payload.get("mask")), ("strength", request.wishes.strength)):
            if given is not None:
                raise _refused(f"{name}: this model takes none; say in words what shall change", name)
        if images and not self.edits:
            raise _refused("image: this model draws from words alone", "image")
        if self.edits and not images:
            raise _refused("image: this model edits pictures, send one", "image")
        if len(images) > self.most:
            raise _refused(f"image: this model takes at most {self.most}, got {len(images)}", "image")
        for image in images:
            height, width = image.shape[:2]
            if max(height, width) > _STEEPEST * min(height, width):
                raise _refused(
                    f"image: {width} x {height} pixels, one side is over {_STEEPEST} times the other", "image"
                )
        return images

    def size(self, wishes: Wishes, given: Sequence[Size]) -> Size:
        """Of the latents that are asked for; where a request doesn't say, those of the last given picture.

        Raises ItemError (400).
        """
        height, width = size_of(wishes, default=SIZE, multiple=self.shrinks * 2)
        tall, wide = given[-1] if given else (height // self.shrinks, width // self.shrinks)
        return Size(
            height // self.shrinks if wishes.height else tall, width // self.shrinks if wishes.width else wide
        )


def fitted(image: Any, area: int) -> Any:
    """A picture uint8 [height, width, 3] in about this many pixels, as a PIL image.

    Both edges are multiples of 32; the shape stays as near as that allows. Resized as diffusers does it.
    """
    import numpy as np
    from PIL import Image

    height, width = image.shape[:2]
    wide = math.sqrt(area * (width / height))
    columns, rows = (max(round(edge / 32), 1) * 32 for edge in (wide, wide / (width / height)))
    return Image.fromarray(np.asarray(image)).resize((columns, rows), Image.Resampling.LANCZOS)


def _refused(message: str, param: str) -> ItemError:
    return ItemError(message, status=400, param=param)
