"""Prompts for scenes, in free word order; and which scenes and orders no training prompt has."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Final, NamedTuple
from zlib import crc32

from scripts.painter.world import Scene

_SIZE_WORDS: Final = {"small": ("small", "little", "tiny"), "large": ("large", "big", "huge")}
_CORNERS: Final = {"top left", "top right", "bottom left", "bottom right"}
_CENTRE: Final = ("in the centre", "in the middle", "in the center", "centred", "at the centre")
_BACKGROUNDS: Final = (
    "on a {} background",
    "on {}",
    "{} background",
    "against a {} background",
    "the background is {}",
    "with a {} background",
    "background: {}",
)
_OBJECTS: Final = (
    "a {size} {colour} {shape}",
    "a {colour} {shape}, {size}",
    "one {size} {shape} in {colour}",
    "a {shape}, {size} and {colour}",
    "{size} {colour} {shape}",
    "the {shape} is {colour} and {size}",
)
#: Orders of object (o), place (p) and background (b) in training prompts, and the one that they never have
ORDERS: Final = ("opb", "obp", "pob", "bop", "pbo")
UNSEEN_ORDER: Final = "bpo"
#: One in so many combinations of shape, colour, place and background is kept out of the training
HELD_OUT_ONE_IN: Final = 8


class Prompt(NamedTuple):
    """Words, and what they ask for. What they leave open is None in ``asked``."""

    text: str
    scene: Scene
    asked: dict[str, str]


def held_out(scene: Scene) -> bool:
    """Whether the training leaves out this combination of shape, colour, place and background."""
    words = f"{scene.shape} {scene.colour} {scene.place} {scene.background}"
    return crc32(words.encode()) % HELD_OUT_ONE_IN == 0


def training(random: Random) -> Iterator[Prompt]:
    """Endless prompts. Some leave out the size, the place or the background."""
    while True:
        scene = Scene.any(random)
        if not held_out(scene):
            yield write(scene, random.choice(ORDERS), random, whole=random.random() < 0.8)


def evaluation(count: int, seed: int = 2026) -> list[Prompt]:
    """Prompts of held-out scenes, half of them in the held-out order. They leave nothing out."""
    random, prompts = Random(seed), list[Prompt]()
    while len(prompts) < count:
        scene = Scene.any(random)
        if held_out(scene):
            order = UNSEEN_ORDER if len(prompts) % 2 else random.choice(ORDERS)
            prompts.append(write(scene, order, random))
    return prompts


def write(scene: Scene, order: str, random: Random, *, whole: bool = True) -> Prompt:
    """Words for a scene: the parts in the given order; unless ``whole``, some of them are left out."""
    left_out = set() if whole else {random.choice(("size", "place", "background"))}
    size = "" if "size" in left_out else random.choice(_SIZE_WORDS[scene.size])
    wording = random.choice(_OBJECTS)
    if not size:
        wording = random.choice(("a {colour} {shape}", "{colour} {shape}", "a {shape} in {colour}"))
    parts = {
        "o": wording.format(size=size, colour=scene.colour, shape=scene.shape),
        "p": "" if "place" in left_out else _place(scene.place, random),
        "b": "" if "background" in left_out else random.choice(_BACKGROUNDS).format(scene.background),
    }
    joint = random.choice((", ", ", ", " "))
    text = joint.join(parts[part] for part in order if parts[part]).replace("a orange", "an orange")
    if random.random() < 0.5:
        text = text[0].upper() + text[1:]
    if random.random() < 0.3:
        text += "."
    asked = {name: value for name, value in scene._asdict().items() if name not in left_out}
    return Prompt(text, scene, asked)


def _place(place: str, random: Random) -> str:
    if place == "centre":
        return random.choice(_CENTRE)
    if place in _CORNERS:
        if random.random() < 0.3:
            upper = place.replace("top", "upper").replace("bottom", "lower")
            return random.choice(("in the {} corner", "in the {}")).format(upper)
        return random.choice(("in the {} corner", "at the {}", "{}", "in the {}")).format(place)
    if place in ("left", "right"):
        return random.choice(("on the {}", "at the {}", "on the {} side", "to the {}")).format(place)
    return random.choice(("at the {}", "{}", "near the {}", "at the {} edge")).format(place)
