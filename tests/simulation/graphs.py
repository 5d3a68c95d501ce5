"""Random graphs, and what each stage of them gives."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import msgspec

from pipelines.graph import Pipeline

ATTEMPTS = 5
TIME_LIMIT_S = 30.0  #: of an attempt


def pick(rng: random.Random, count: int) -> int:
    """A number from 0 to ``count - 1``; ``randrange`` takes four times as long."""
    return int(rng.random() * count)


def random_pipeline(rng: random.Random, checkpoints: list[str]) -> Pipeline:
    """A graph of 1 to 5 stages, each fed by the caller or by earlier ones, all of them of some use.

    Args:
        rng: Randomness.
        checkpoints: What an edge may keep; each edge draws one of these.
    """
    names = [f"s{i}" for i in range(rng.randint(1, 5))]
    edges: list[dict[str, Any]] = []
    for i, name in enumerate(names):
        for producer in rng.sample(["request", *names[:i]], rng.randint(1, min(2, i + 1))):
            kept = rng.choice(checkpoints)
            edges.append({"from": producer, "to": name, "stream": rng.random() < 0.7, "checkpoint": kept})
    used = {edge["from"] for edge in edges}
    outputs = {f"o{name}": name for name in names if name not in used or rng.random() < 0.3}
    stages = {name: _stage(rng) for name in names}
    limits = {"ahead_chunks": rng.choice([4, 6, 64]), "ahead_mb": rng.choice([8.0, 8.0, 64 / 2**20])}
    document = {"name": "p", "outputs": outputs, "stages": stages, "edges": edges, "limits": limits}
    return msgspec.convert(document, Pipeline)


def _stage(rng: random.Random) -> dict[str, Any]:
    options = {
        "resumes": rng.random() < 0.5,  #: goes on after what is out, with its own state
        "eager": rng.random() < 0.3,  #: gives chunks before it has taken as many
        "in_turn": rng.random() < 0.3,  #: takes one edge to its end, then the next
        "capacity": rng.randint(1, 3),
    }
    retry = {"attempts": ATTEMPTS, "timeout_s": TIME_LIMIT_S}
    return {"engine": "f", "retry": retry, "options": options}


@lru_cache(maxsize=4096)
def content(seed: int, stage: int) -> list[int]:
    """What a stage gives for a request with this seed: the same in each attempt."""
    rng = random.Random(seed * 1000 + stage)
    count = rng.randint(0, 4) if rng.random() < 0.6 else rng.randint(5, 16)
    return [rng.randrange(1 << 30) for _ in range(count)]


def state(seed: int, stage: int, seq: int) -> int:
    """What an engine notes in a checkpoint after ``seq`` chunks."""
    return (seed * 31 + stage * 7 + seq) & 0xFFFFFF
