from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def make(folder: Path, **settings: Any) -> Path:
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from pipelines.convert import qwen_image_tiny

    torch.set_num_threads(1)
    qwen_image_tiny.make(folder, **settings)
    return folder


@pytest.fixture(scope="session")
def draws(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small random model, made once for all tests."""
    return make(tmp_path_factory.mktemp("qwen_image") / "draws")


@pytest.fixture(scope="session")
def edits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one that edits; its weights are the other's."""
    return make(tmp_path_factory.mktemp("qwen_image") / "edits", edit=True)


@pytest.fixture(scope="session")
def pipe(draws: Path) -> Any:
    """diffusers' own pipeline on the same weights."""
    from diffusers import QwenImagePipeline

    return QwenImagePipeline.from_pretrained(draws)
