from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small random model, made once for all tests."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from pipelines.convert import glm_image_tiny

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("glm_image") / "tiny"
    glm_image_tiny.convert(folder, folder)
    return folder


@pytest.fixture(scope="session")
def pipe(checkpoint: Path) -> Any:
    """diffusers' own pipeline on the same weights. Its language model always draws; here the likeliest."""
    from diffusers import GlmImagePipeline

    pipe = GlmImagePipeline.from_pretrained(checkpoint)
    model = pipe.vision_language_encoder
    model.generation_config.top_k = 1
    # diffusers joins what the tower says of pictures of one size along the axis of its channels; transformers
    # 5.19 wants a list, and without this all edits fail.
    tokens, channels = model.get_image_tokens, model.config.vq_config.latent_channels
    model.get_image_tokens = lambda joined, grids: tokens(joined.split(channels))
    return pipe
