"""The painter's world: what its rules draw, its checker finds again; what is held out stays out."""

from __future__ import annotations

from itertools import islice
from random import Random

import numpy as np
import pytest

from scripts.painter import checker, prompts, world
from scripts.painter.world import JITTER, Scene


def test_the_checker_finds_what_the_rules_draw() -> None:
    random = Random(3)
    for _ in range(60):
        scene = Scene.any(random)
        drawn = world.draw(scene, random.randint(-JITTER, JITTER), random.randint(-JITTER, JITTER))
        assert checker.see(drawn) == scene


def test_the_checker_takes_small_faults_for_small() -> None:
    scene = Scene("star", "purple", "small", "top left", "green")
    noise = np.random.default_rng(1).normal(0, 12, (64, 64, 3))
    assert checker.see((world.draw(scene) + noise).clip(0, 255).astype(np.uint8)) == scene


@pytest.mark.parametrize(
    "fault", ["blank", "noise", "two shapes", "a colour of no name", "half a shape", "between places"]
)
def test_the_checker_is_not_fooled(fault: str) -> None:
    scene = Scene("square", "red", "large", "centre", "blue")
    picture = world.draw(scene)
    if fault == "blank":
        picture[:] = picture[0, 0]
    elif fault == "noise":
        picture = np.random.default_rng(1).integers(0, 256, picture.shape, np.uint8)
    elif fault == "two shapes":
        other = world.draw(scene._replace(place="top left", size="small"))
        picture[:24, :24] = other[:24, :24]
    elif fault == "a colour of no name":
        picture[(picture == picture[32, 32]).all(2)] = (140, 90, 20)
    elif fault == "half a shape":
        picture[32:] = picture[0, 0]
    else:
        picture = np.roll(picture, 8, axis=1)
    assert not all(checker.right(scene, picture).values())


def test_each_thing_that_is_wrong_is_named() -> None:
    scene = Scene("circle", "red", "large", "top", "white")
    painted = world.draw(scene._replace(colour="orange", place="top right"))
    assert checker.right(scene, painted) == {
        "shape": True,
        "colour": False,
        "place": False,
        "background": True,
    }


def test_no_training_prompt_has_a_held_out_scene_or_the_unseen_order() -> None:
    judged = prompts.evaluation(300)
    assert prompts.evaluation(300) == judged
    assert len({prompt.text for prompt in judged}) > 290
    trained = {prompt.scene._replace(size="small") for prompt in islice(prompts.training(Random(1)), 20_000)}
    assert not trained & {prompt.scene._replace(size="small") for prompt in judged}
    assert prompts.UNSEEN_ORDER not in prompts.ORDERS


def test_prompts_ask_for_what_their_scene_has_and_say_so() -> None:
    for prompt in islice(prompts.training(Random(2)), 300):
        assert prompt.asked.items() <= prompt.scene._asdict().items()
        for name in {"shape", "colour", "background"} & prompt.asked.keys():
            assert prompt.asked[name] in prompt.text.lower()
