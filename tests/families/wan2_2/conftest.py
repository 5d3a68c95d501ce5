from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Case(NamedTuple):
    """One of Wan 2.2's forms, with a picture or without."""

    checkpoint: Path
    pictures: bool

    def pipe(self) -> Any:
        """diffusers' own pipeline on the same weights."""
        import diffusers

        kind = diffusers.WanImageToVideoPipeline if self.pictures else diffusers.WanPipeline
        return kind.from_pretrained(self.checkpoint)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """Makes the small random model of a form, each once."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from pipelines.convert import wan2_2_tiny

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("wan2_2")

    @cache
    def make(form: wan2_2_tiny.Form) -> Path:
        wan2_2_tiny.make(folder / form, form)
        return folder / form

    return make


@pytest.fixture(scope="session", params=["t2v", "i2v", "ti2v", "ti2v and a picture"])
def case(request: pytest.FixtureRequest, made: Callable[[Any], Path]) -> Case:
    """Each form; the one that makes films of both in both ways."""
    form = request.param.split()[0]
    return Case(made(form), pictures=request.param not in ("t2v", "ti2v"))
