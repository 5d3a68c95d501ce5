"""What these tests leave: nothing. But a cluster outlives them, with what they start again on its hosts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines import models
from pipelines.loader import load
from scripts.leftovers import files_in
from tests.leftovers import descriptors, descriptors_above, until


@pytest.fixture(autouse=True)
def leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As everywhere, but for child processes: those of a cluster are counted at its end, on every host."""
    with tempfile.TemporaryDirectory(prefix="omni-test-", dir="/dev/shm") as name:
        folder = Path(name)
        for variable, sub in (("OMNI_RUN_DIR", "run"), ("OMNI_SHM_DIR", "shm"), ("OMNI_STATE_DIR", "state")):
            monkeypatch.setenv(variable, str(folder / sub))
            (folder / sub).mkdir(mode=0o700)
        opened = descriptors()
        yield folder
        assert files_in(folder) == []
        until(lambda: not descriptors_above(opened), "descriptors to be closed")


@pytest.fixture(autouse=True)
def models_at_hand(request: pytest.FixtureRequest) -> None:
    """The hosts of these tests reach each other and nothing else, so models are pulled before they start."""
    if request.node.get_closest_marker("models"):
        for stage in load("voice").stages.values():
            if stage.model is not None:
                models.ensure(stage.model)
