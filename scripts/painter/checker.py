"""Says what a picture shows, by comparing its pixels with the drawing rules. No trained model has a say."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scripts.painter.world import COLOURS, EDGE, JITTER, PLACES, SHAPES, SIZES, Scene, mask

#: How far a colour may be off (Euclidean, of 255), and how well the outline must fit (intersection / union)
COLOUR_OFF: Final = 60.0
OVERLAP: Final = 0.75

JUDGED: Final = ("shape", "colour", "place", "background")


def see(picture: NDArray[np.uint8]) -> Scene | None:
    """The scene that the rules would have drawn like this; None if they would have drawn nothing like it.

    Args:
        picture: [64, 64, 3]
    """
    pixels = picture.astype(np.float32)
    rim = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    paper = np.median(rim, axis=0)
    background = _name(paper)
    if background is None:
        return None
    off = np.linalg.norm(pixels - paper, axis=2)
    inner = off > 0.8 * np.quantile(off, 0.99)
    if not inner.any():
        return None
    ink = np.median(pixels[inner], axis=0)
    colour = _name(ink)
    if colour is None or colour == background:
        return None
    # How much of each pixel is ink: its place on the line between the two colours.
    line = ink - paper
    cover = _decided((pixels - paper) @ line / (line @ line)).reshape(-1)
    scenes, masks = _candidates()
    both = masks @ cover
    overlap = both / (masks.sum(1) + cover.sum() - both)
    best = int(overlap.argmax())
    # Half-covered pixels count as less than one in the overlap of a mask with itself.
    if overlap[best] / _own_overlap()[best] < OVERLAP:
        return None
    shape, size, place = scenes[best]
    return Scene(shape, colour, size, place, background)


def right(scene: Scene, picture: NDArray[np.uint8], judged: Sequence[str] = JUDGED) -> dict[str, bool]:
    """Of each thing that was asked for, whether the picture has it."""
    seen = see(picture)
    return {name: seen is not None and getattr(seen, name) == getattr(scene, name) for name in judged}


def _decided(cover: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cover without what is faint: up to a quarter is nothing, from three quarters on everything."""
    return (cover * 2 - 0.5).clip(0, 1)


def _name(colour: NDArray[np.float32]) -> str | None:
    names, table = list(COLOURS), np.array(list(COLOURS.values()), np.float32)
    off = np.linalg.norm(table - colour, axis=1)
    nearest = int(off.argmin())
    return names[nearest] if off[nearest] <= COLOUR_OFF else None


@cache
def _candidates() -> tuple[list[tuple[str, str, str]], NDArray[np.float32]]:
    scenes, masks = [], []
    offsets = range(-JITTER - 1, JITTER + 2)
    for shape in SHAPES:
        for size in SIZES:
            for place in PLACES:
                for dx in offsets:
                    for dy in offsets:
                        scenes.append((shape, size, place))
                        masks.append(_decided(mask(shape, size, place, dx, dy)).reshape(EDGE * EDGE))
    return scenes, np.array(masks)


@cache
def _own_overlap() -> NDArray[np.float32]:
    masks = _candidates()[1]
    own = (masks * masks).sum(1)
    overlap: NDArray[np.float32] = own / (2 * masks.sum(1) - own)
    return overlap
