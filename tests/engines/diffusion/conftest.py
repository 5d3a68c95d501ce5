from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random SD3, made once for all tests."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from pipelines.convert import sd3_tiny

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("sd3") / "tiny"
    sd3_tiny.convert(folder, folder)
    return folder
