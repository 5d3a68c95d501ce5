"""The small random model, and transformers' own on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest

from pipelines.qwen2_5_omni.transfers import replies
from tests.families.qwen2_5_omni.reference import Reference
from tests.families.rig import Rig, running

Rigs = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once for all tests."""
    torch = pytest.importorskip("torch")
    from pipelines.convert import qwen2_5_omni_tiny

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("qwen2_5") / "tiny"
    qwen2_5_omni_tiny.convert(folder, folder)
    return folder


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    """transformers' whole model."""
    return Reference(checkpoint)


@pytest.fixture
def rig(checkpoint: Path) -> Rigs:
    """Starts stages by their names (none: all), joined by the pipeline's own edges."""
    return partial(running, checkpoint, family="workers.families.qwen2_5_omni", transfer=replies)
