"""What `painter` can draw: pictures of one shape, and the rules that draw them.

A picture is a shape of one colour at one of nine places on a background of another colour, 64 x 64 pixels.
The same rules make the training pictures and judge what is painted (:mod:`scripts.painter.checker`).
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

EDGE: Final = 64  #: pixels
JITTER: Final = 1  #: pixels that a shape may lie off its place, in each direction
_SAMPLES: Final = 8  #: per pixel and direction, for smooth borders

SHAPES: Final = ("circle", "square", "triangle", "star", "ring", "cross")
#: Name -> RGB. A shape and its background may each have any of them, but not the same
COLOURS: Final = {
    "red": (215, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 220, 50),
    "orange": (245, 135, 30),
    "purple": (140, 60, 180),
    "white": (245, 245, 245),
    "black": (20, 20, 20),
}
#: Name -> distance in pixels from a shape's middle to its farthest point
SIZES: Final = {"small": 8, "large": 13}
#: Name -> the middle of the shape, (x, y)
PLACES: Final = {
    "top left": (16, 16),
    "top": (32, 16),
    "top right": (48, 16),
    "left": (16, 32),
    "centre": (32, 32),
    "right": (48, 32),
    "bottom left": (16, 48),
    "bottom": (32, 48),
    "bottom right": (48, 48),
}


class Scene(NamedTuple):
    """What a picture shows, in the words of the tables above."""

    shape: str
    colour: str
    size: str
    place: str
    background: str

    @classmethod
    def any(cls, random: Random) -> Scene:
        """One of all, each as likely as another."""
        colour, background = random.sample(list(COLOURS), 2)
        return cls(
            random.choice(SHAPES), colour, random.choice(list(SIZES)), random.choice(list(PLACES)), background
        )


def draw(scene: Scene, dx: int = 0, dy: int = 0) -> NDArray[np.uint8]:
    """The picture, [64, 64, 3], its shape ``dx`` and ``dy`` pixels right of and below its place."""
    cover = mask(scene.shape, scene.size, scene.place, dx, dy)[:, :, None]
    ink, paper = (np.array(COLOURS[name], np.float32) for name in (scene.colour, scene.background))
    return np.rint(paper + cover * (ink - paper)).astype(np.uint8)


def mask(shape: str, size: str, place: str, dx: int = 0, dy: int = 0) -> NDArray[np.float32]:
    """How much of each pixel the shape covers, [64, 64], 0 to 1."""
    x, y = PLACES[place]
    return np.roll(_centred(shape, size), (y + dy - EDGE // 2, x + dx - EDGE // 2), axis=(0, 1))


@cache
def _centred(shape: str, size: str) -> NDArray[np.float32]:
    grid = (np.arange(EDGE * _SAMPLES) + 0.5) / _SAMPLES - EDGE / 2
    y, x = np.meshgrid(grid, grid, indexing="ij")
    inside = _inside(shape, x, y, float(SIZES[size]))
    cover: NDArray[np.float32] = inside.reshape(EDGE, _SAMPLES, EDGE, _SAMPLES).mean((1, 3), dtype=np.float32)
    return cover


def _inside(shape: str, x: NDArray[np.float64], y: NDArray[np.float64], r: float) -> NDArray[np.bool_]:
    """Whether points lie in a shape around the origin; y points down."""
    distance = np.hypot(x, y)
    if shape == "circle":
        return distance <= r * 0.95
    if shape == "ring":
        return (distance <= r) & (distance >= r * 0.6)
    if shape == "square":
        return np.maximum(abs(x), abs(y)) <= r * 0.85
    if shape == "cross":
        arm = r * 0.3
        return (np.minimum(abs(x), abs(y)) <= arm) & (np.maximum(abs(x), abs(y)) <= r)
    if shape == "triangle":
        return (y <= r * 0.85) & (abs(x) <= (y + r) * 0.53)
    # A star of five: the union of the half-planes' five-fold intersections is its outline's sign by angle.
    angle = np.arctan2(x, -y) % (2 * np.pi / 5)
    angle = np.minimum(angle, 2 * np.pi / 5 - angle)  # 0 at a point, pi / 5 at a notch
    notch, half = r * 0.42, np.pi / 5
    # The border runs straight from the point (r at angle 0) to the notch (at angle pi / 5).
    border = r * notch * np.sin(half) / (r * np.sin(angle) + notch * np.sin(half - angle))
    inside: NDArray[np.bool_] = distance <= border
    return inside
