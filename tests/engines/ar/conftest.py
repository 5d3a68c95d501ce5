"""Checkpoints of tiny models, and engines that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.ar import tiny
from tests.engines.helpers import stage, started
from workers.engines.ar.engine import ArEngine

Serve = Callable[..., AbstractAsyncContextManager[ArEngine]]


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models so small are slower with two threads, and far slower where something else runs too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind -> folder."""
    return {kind: tiny.make(tmp_path_factory.mktemp(kind), kind) for kind in ("llama", "qwen2")}


@pytest.fixture
def serve(checkpoints: dict[str, Path]) -> Serve:
    """serve("llama", max_num_seqs=4, block_size=4, ...): an engine, loaded."""

    def make(kind: str = "llama", max_num_seqs: int = 8, **options: Any) -> Any:
        settings: dict[str, Any] = {
            "model": str(checkpoints[kind]),
            "batch": {"max_num_seqs": max_num_seqs},
            "resources": {"threads": 1},
            "options": {"kv_cache_gib": 0.005, "block_size": 8, **options},
        }
        return started(ArEngine(stage("ar", **settings), device="cpu"))

    return make
