"""docs/pipelines.md is true: its pipelines load, and no setting is missing from it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from pipelines.checks import ENDPOINTS
from pipelines.graph import Batch, Edge, Endpoint, Limits, Pipeline, Resources, Retry, Scaling, Stage, Window
from pipelines.loader import load
from pipelines.options import ENGINES

DOCS = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()


def test_its_pipelines_load(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(name: .*?)```", DOCS, re.DOTALL)
    assert blocks
    for block in blocks:
        file = tmp_path / "pipeline.yaml"
        file.write_text(block)
        assert load(file).order()


def test_it_names_every_setting() -> None:
    kinds = [Pipeline, Stage, Batch, Resources, Scaling, Retry, Edge, Window, Endpoint, Limits]
    kinds += [info.options for info in ENGINES.values()]
    names = {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}
    named = set(re.findall(r"\w[\w-]*", DOCS))
    assert names - named - {"batch", "resources", "retry"} == set()
    assert set(ENGINES) - named == set()
    assert set(ENDPOINTS) - named == set()
