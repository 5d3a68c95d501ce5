from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.families.diffusion_rig import Rig, running


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small random model, made once for all tests."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from pipelines.convert import sd3_tiny

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("sd3") / "tiny"
    sd3_tiny.convert(folder, folder)
    return folder


@pytest.fixture(scope="session")
def pipe(checkpoint: Path) -> Any:
    """diffusers' own pipeline on the same weights."""
    from diffusers import StableDiffusion3Pipeline

    return StableDiffusion3Pipeline.from_pretrained(checkpoint)


@pytest_asyncio.fixture
async def rig(checkpoint: Path) -> AsyncIterator[Rig]:
    """All stages, as the pipeline sets them."""
    async with running("sd3", checkpoint) as made:
        yield made
