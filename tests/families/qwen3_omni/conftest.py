from __future__ import annotations

from pathlib import Path

import pytest

from tests.families.qwen3_omni.reference import Reference


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small random model, made once for all tests."""
    torch = pytest.importorskip("torch")
    from pipelines.convert import qwen3_omni_tiny

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("qwen3") / "tiny"
    qwen3_omni_tiny.convert(folder, folder)
    return folder


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    """transformers' whole model on the same weights."""
    return Reference(checkpoint)
