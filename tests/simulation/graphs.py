"""Random graphs, and what each stage of them gives."""

from __future__ import annotations

import random
from functools import lru_cache

import msgspec

from pipelines.graph import Pipeline


def pick(rng: random.Random, count: int) -> int:
    """A number from 0 to ``count - 1``; ``randrange`` takes four times as long."""
    return int(rng.random() * count)


def random_pipeline(rng: random.Random) -> Pipeline:
    """A graph of 1 to 5 stages, each fed by the caller or by earlier ones, all of them of some use."""
    names = [f"s{i}" for i in range(rng.randint(1, 5))]
    edges = []
    for i, name in enumerate(names):
        producers = rng.sample(["request", *names[:i]], rng.randint(1, min(2, i + 1)))
        edges += [{"from": p, "to": name, "stream": rng.random() < 0.7} for p in producers]
    used = {edge["from"] for edge in edges}
    outputs = {f"o{name}": name for name in names if name not in used or rng.random() < 0.3}
    stages = {n: {"engine": "f", "retry": {"attempts": 5, "timeout_s": 500}} for n in names}
    return msgspec.convert({"name": "p", "outputs": outputs, "stages": stages, "edges": edges}, Pipeline)


@lru_cache(maxsize=4096)
def content(request: int, stage: int) -> list[int]:
    """What a stage gives for a request: the same in each attempt."""
    rng = random.Random(request * 1000 + stage)
    return [rng.randrange(1 << 30) for _ in range(rng.randint(0, 4))]
