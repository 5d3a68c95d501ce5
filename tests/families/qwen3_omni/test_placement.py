"""Rows of media stand where transformers puts them, whatever their sizes and order."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.families.qwen3_omni.reference import Reference

ROLES = (257, 258)  #: tokens of no medium


def prompt(draw: random.Random, rules: Any, *, sound_in_films: bool) -> tuple[list[int], list[Any], bool]:
    """Ids, their spans, and whether any is a picture or film. Each medium stands between its own marks."""
    from pipelines.convert.qwen3_omni_tiny import IDS
    from workers.families.qwen3_omni.placement import Span

    ids, spans, seen = [*ROLES], [], False
    for _ in range(draw.randrange(1, 5)):
        kind = draw.choice(["audio", "image", "video"])
        grid = (draw.randrange(1, 5), 2 * draw.randrange(1, 4), 2 * draw.randrange(1, 4))
        seconds = draw.choice([0.5, 1.0, 4 / 3, 2.0])
        if kind == "audio":
            span, marks = Span(sound=draw.randrange(1, 30)), ("<|audio_start|>", "<|audio_end|>")
        elif kind == "image":
            span, marks = Span(grid=(1, *grid[1:])), ("<|vision_start|>", "<|vision_end|>")
        else:
            sound = draw.randrange(1, 60) if sound_in_films else 0
            span = Span(sound, grid, seconds, in_film=sound_in_films)
            marks = ("<|vision_start|>", "<|vision_end|>")
        rows = rules.order(span, kind)
        if span.in_film:
            rows = [IDS["<|audio_start|>"], *rows, IDS["<|audio_end|>"]]
        ids += [IDS[marks[0]], *rows, IDS[marks[1]], *draw.choices(range(97, 120), k=draw.randrange(3))]
        spans.append(span)
        seen = seen or kind != "audio"
    return [*ids, *ROLES], spans, seen


def rope_index(model: Any, ids: list[int], spans: list[Any], *, sound_in_films: bool) -> Any:
    """transformers' positions; lengths of sound are given in mel frames, 100 of which make 13 rows."""
    import torch

    sounds = [frames_of(span.sound) for span in spans if span.sound]
    images = [span.grid for span in spans if span.grid and span.seconds is None]
    films = [span for span in spans if span.seconds is not None]
    positions, deltas = model.get_rope_index(
        torch.tensor([ids]),
        torch.tensor(images) if images else None,
        torch.tensor([span.grid for span in films]) if films else None,
        torch.ones(1, len(ids), dtype=torch.long),
        sound_in_films,
        torch.tensor(sounds) if sounds else None,
        torch.tensor([span.seconds for span in films]) if films else None,
    )
    return positions[:, 0], float(deltas.reshape(-1)[0]) + len(ids)


def frames_of(rows: int) -> int:
    """Some number of mel frames that the audio tower makes so many rows of."""
    return rows // 13 * 100 + rows % 13 * 8


@pytest.mark.parametrize("sound_in_films", [False, True])
def test_positions_are_those_of_transformers(reference: Reference, sound_in_films: bool) -> None:
    from workers.families.qwen3_omni.placement import Rules

    thinker = reference.model.thinker
    rules = Rules(thinker.config, thinker.config.vision_config.spatial_merge_size)
    draw = random.Random(1)
    for _ in range(60):
        ids, spans, _ = prompt(draw, rules, sound_in_films=sound_in_films)
        wanted, following = rope_index(thinker, ids, spans, sound_in_films=sound_in_films)
        positions = rules.positions(ids, spans)
        assert positions.tolist() == wanted.float().tolist(), spans
        assert float(positions.max()) + 1 == following
