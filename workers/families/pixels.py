"""Pictures and films to the patches that Qwen's vision towers read, as transformers' Qwen2VL processors do.

The steps are those of ``Qwen2VLImageProcessor`` and ``Qwen2VLVideoProcessor``: a size that is a multiple of
the merged patches and within bounds, bicubic resizing, normalisation, patches in the order in which the tower
merges them. They are done here since transformers' need torchvision, which has no build that goes with every
build of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipelines.options import OmniEncoderOptions
from workers.families.media import Medium, refused
from workers.families.weights import read_json

_STEEPEST = 200  #: a picture may be so many times as wide as it is high, or the other way round


class Vision(msgspec.Struct, frozen=True):
    """What of a checkpoint's preprocessing settings concerns pictures."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Vision:
        """From ``preprocessor_config.json``."""
        return msgspec.convert({key: value for key, value in settings.items() if value is not None}, cls)


def bounds_of(settings: Mapping[str, Any], default: tuple[int, int]) -> tuple[int, int]:
    """Fewest and most pixels that ``preprocessor_config.json`` allows, under its older or its newer names."""
    size = settings.get("size") or {}
    return (
        settings.get("min_pixels") or size.get("shortest_edge") or default[0],
        settings.get("max_pixels") or size.get("longest_edge") or default[1],
    )


class Patches(NamedTuple):
    """A picture or film, ready for the tower."""

    values: Any  #: torch float32 [patches, channels x temporal x patch x patch]
    grid: tuple[int, int, int]  #: patches along time, height and width


class Cutter:
    """How a checkpoint's pictures and films are cut.

    Args:
        folder: The checkpoint, with ``preprocessor_config.json``.
        options: Bounds that go before the checkpoint's own.
        image: Fewest and most pixels of a picture, where neither says anything.
        video: The same of a film's frame; checkpoints don't say.
    """

    def __init__(
        self, folder: Path, options: OmniEncoderOptions, *, image: tuple[int, int], video: tuple[int, int]
    ) -> None:
        settings = read_json(folder / "preprocessor_config.json")
        self.vision = Vision.of(settings)
        own = bounds_of(settings, image)
        self._image = options.min_pixels or own[0], options.max_pixels or own[1]
        self._video = options.video_min_pixels or video[0], options.video_max_pixels or video[1]

    def cut(self, kind: str, media: Sequence[Medium]) -> list[Patches]:
        """Pictures ("image") or films to patches. Raises as :func:`patches`."""
        if kind == "image":
            return [patches(medium.data[None], self.vision, self._image) for medium in media]
        return [patches(medium.data, self.vision, self._video) for medium in media]

    def rows(self, cut: Patches) -> int:
        """Rows that the tower makes of it."""
        return len(cut.values) // int(self.vision.merge_size) ** 2

    def facts(self, kind: str, medium: Medium, cut: Patches) -> dict[str, Any]:
        """What the thinker must know to place the rows: "grid", of a film also "seconds_per_grid"."""
        if kind == "image":
            return {"grid": list(cut.grid)}
        return {"grid": list(cut.grid), "seconds_per_grid": self.vision.temporal_patch_size / medium.fps}


def patches(frames: NDArray[np.uint8], vision: Vision, bounds: tuple[int, int]) -> Patches:
    """Frames uint8 [T, H, W, 3] -> patches; ``bounds``: fewest and most pixels of a frame.

    The last frame is repeated where the time axis needs it. Raises ItemError (400) for a picture that is too
    narrow.
    """
    import torch

    height, width = size_for(frames.shape[1], frames.shape[2], vision, bounds)
    pixels = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2)
    if pixels.shape[2:] != (height, width):
        # On uint8, as transformers does: rounded, and cut at 0 and 255.
        pixels = torch.nn.functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
    mean = torch.tensor(vision.image_mean).view(1, -1, 1, 1) / vision.rescale_factor
    std = torch.tensor(vision.image_std).view(1, -1, 1, 1) / vision.rescale_factor
    pixels = (pixels.float() - mean) / std
    if missing := -len(pixels) % vision.temporal_patch_size:
        pixels = torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)])
    return _cut(pixels, vision)


def size_for(height: int, width: int, vision: Vision, bounds: tuple[int, int]) -> tuple[int, int]:
    """Height and width to resize a frame to, as ``smart_resize`` of transformers' qwen2_vl gives them.

    Both are multiples of the merged patch, their product lies within the bounds, and their ratio is about
    what it was. Raises ItemError (400) for a ratio above 200.
    """
    if max(height, width) > _STEEPEST * min(height, width):
        raise refused(f"a picture of {width} x {height} pixels: one side is more than 200 times the other")
    step, (fewest, most) = vision.patch_size * vision.merge_size, bounds
    tall, wide = round(height / step) * step, round(width / step) * step
    if tall * wide > most:
        shrink = math.sqrt(height * width / most)
        tall = max(step, math.floor(height / shrink / step) * step)
        wide = max(step, math.floor(width / shrink / step) * step)
    elif tall * wide < fewest:
        grow = math.sqrt(fewest / (height * width))
        tall = math.ceil(height * grow / step) * step
        wide = math.ceil(width * grow / step) * step
    return tall, wide


def _cut(pixels: Any, vision: Vision) -> Patches:
    """[T, channels, H, W] to patches: those that are merged lie together, block by block, row by row."""
    frames, channels, height, width = pixels.shape
    patch, merge, span = vision.patch_size, vision.merge_size, vision.temporal_patch_size
    grid = frames // span, height // patch, width // patch
    blocks = pixels.reshape(
        grid[0], span, channels, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch
    )
    # time, block row, block column, row and column in the block; channel, time, row, column in the patch
    ordered = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return Patches(ordered.reshape(math.prod(grid), -1), grid)


def joined(cuts: Sequence[Patches], *, device: str, dtype: Any) -> tuple[Any, Any]:
    """Several pictures for one pass: values [all patches, ...] and grids int [pictures, 3]."""
    import torch

    values = torch.cat([cut.values for cut in cuts]).to(device, dtype)
    return values, torch.tensor([cut.grid for cut in cuts], device=device)
