from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def make(folder: Path, **settings: Any) -> Path:
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from pipelines.convert import flux_tiny

    torch.set_num_threads(1)
    flux_tiny.make(folder, **settings)
    return folder


@pytest.fixture(scope="session")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small random model, made once for all tests."""
    return make(tmp_path_factory.mktemp("flux") / "dev")


@pytest.fixture(scope="session")
def schnell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that is told no guidance scale, and has a fixed schedule."""
    return make(tmp_path_factory.mktemp("flux") / "schnell", guidance_embeds=False)
