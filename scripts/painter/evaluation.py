"""How well the painter does what held-out prompts ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.painter.checker import JUDGED, right
from scripts.painter.painting import Plain
from scripts.painter.prompts import Prompt, evaluation
from scripts.painter.state import Progress
from workers.families.painter.wishes import GUIDANCE, STEPS


def evaluate(
    painter: Plain, count: int, *, steps: int = STEPS, guidance: float = GUIDANCE, batch: int = 20
) -> tuple[dict[str, Any], list[Prompt], NDArray[np.uint8]]:
    """The shares of pictures that are right, the prompts and the pictures."""
    prompts, pictures = evaluation(count), []
    progress = Progress("evaluation", count)
    for first in range(0, count, batch):
        some = [prompt.text for prompt in prompts[first : first + batch]]
        pictures.append(painter.paint(some, range(first, first + len(some)), steps, guidance))
        progress.at(first + len(some))
    everything = np.concatenate(pictures)
    return figures(prompts, everything) | {"steps": steps, "guidance_scale": guidance}, prompts, everything


def figures(prompts: list[Prompt], pictures: NDArray[np.uint8]) -> dict[str, Any]:
    """Shares, 0 to 1: all four things right; each of them; in orders that were seen and not."""
    judged = [right(prompt.scene, picture) for prompt, picture in zip(prompts, pictures, strict=True)]
    whole = [all(each.values()) for each in judged]
    return {
        "prompts": len(prompts),
        "right": _share(whole),
        "right_seen_orders": _share(whole[::2]),
        "right_unseen_order": _share(whole[1::2]),
        **{name: _share([each[name] for each in judged]) for name in JUDGED},
    }


def grid(pictures: NDArray[np.uint8], columns: int, scale: int, file: Path) -> None:
    """Writes pictures as one PNG, with a thin white gap between them."""
    from PIL import Image

    gap, edge = 2, pictures.shape[1]
    rows = -(-len(pictures) // columns)
    sheet = np.full((rows * (edge + gap) - gap, columns * (edge + gap) - gap, 3), 255, np.uint8)
    for index, picture in enumerate(pictures):
        top, left = (place * (edge + gap) for place in divmod(index, columns))
        sheet[top : top + edge, left : left + edge] = picture
    image = Image.fromarray(sheet)
    image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST).save(
        file, optimize=True
    )


def _share(hits: list[bool]) -> float:
    return round(sum(hits) / max(1, len(hits)), 4)
