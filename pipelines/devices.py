"""Which devices this machine has, found without loading torch, and which worker gets which."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelines.graph import Stage
from pipelines.options import ENGINES


def gpu_count() -> int:
    """NVIDIA GPUs that this process may use: CUDA_VISIBLE_DEVICES if set, else the device files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])


def place(stages: Sequence[Stage], gpus: int) -> list[list[str]]:
    """The devices of each stage's replicas, as `omni-worker --device` takes them ("cpu", "cuda:0,cuda:1").

    `auto` goes round over the GPUs for engines that use one, and is the CPU for the others and where there
    is none: first for the replicas that are always there, then for those that a stage may have besides. A
    list is dealt out in groups of `tensor_parallel_size`, again and again.
    """
    rota = itertools.cycle(range(gpus)) if gpus else None
    placed = [[_next(stage, rota, i) for i in range(stage.resources.least)] for stage in stages]
    for stage, devices in zip(stages, placed, strict=True):
        devices += [_next(stage, rota, i) for i in range(stage.resources.least, stage.resources.most)]
    return placed


def _next(stage: Stage, rota: Iterator[int] | None, replica: int) -> str:
    devices, ranks = stage.resources.devices, stage.resources.tensor_parallel_size
    if devices == "auto":
        if rota is None or stage.engine not in ENGINES or not ENGINES[stage.engine].gpu:
            return "cpu"
        return ",".join(f"cuda:{next(rota)}" for _ in range(ranks))
    if isinstance(devices, str):
        return devices
    groups = [devices[i : i + ranks] for i in range(0, len(devices) - ranks + 1, ranks)]
    return ",".join(groups[replica % len(groups)])
