"""The drawing rules on torch: batches of training pictures, as fast as a table can be read."""

from __future__ import annotations

import numpy as np
import torch

from scripts.painter.world import COLOURS, JITTER, PLACES, SHAPES, SIZES, mask

#: A scene as numbers, in this order; -1: left open
FIELDS = ("shape", "colour", "size", "place", "background")
_NAMES: dict[str, list[str]] = {
    "shape": list(SHAPES),
    "colour": list(COLOURS),
    "size": list(SIZES),
    "place": list(PLACES),
    "background": list(COLOURS),
}


def as_numbers(asked: dict[str, str]) -> list[int]:
    """What a prompt asks for, as indices into the tables."""
    return [_NAMES[field].index(asked[field]) if field in asked else -1 for field in FIELDS]


def completed(asked: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Draws what is left open. [n, 5] -> [n, 5]; shape and background never have one colour."""
    scenes = asked.clone()
    for column, field in enumerate(FIELDS):
        drawn = torch.randint(len(_NAMES[field]), (len(asked),), generator=random)
        scenes[:, column] = torch.where(asked[:, column] < 0, drawn, asked[:, column])
    other = torch.randint(1, len(COLOURS), (len(asked),), generator=random)
    clash = scenes[:, 1] == scenes[:, 4]
    scenes[:, 4] = torch.where(clash, (scenes[:, 1] + other) % len(COLOURS), scenes[:, 4])
    return scenes


class Pictures:
    """Draws scenes, each a little off its place."""

    def __init__(self) -> None:
        offsets = range(-JITTER, JITTER + 1)
        table = [
            [
                [[mask(shape, size, place, dx, dy) for dy in offsets for dx in offsets] for place in PLACES]
                for size in SIZES
            ]
            for shape in SHAPES
        ]
        self._masks = torch.from_numpy(np.array(table))  # [shapes, sizes, places, offsets, 64, 64]
        self._colours = torch.tensor(list(COLOURS.values())) / 127.5 - 1

    def draw(self, scenes: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        """[n, 5] -> [n, 3, 64, 64], -1 to 1."""
        shape, colour, size, place, background = scenes.unbind(1)
        offset = torch.randint(self._masks.shape[3], (len(scenes),), generator=random)
        cover = self._masks[shape, size, place, offset][:, None]
        ink, paper = (self._colours[index][:, :, None, None] for index in (colour, background))
        return paper + cover * (ink - paper)
