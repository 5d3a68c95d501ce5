"""Loads pipelines by name or from YAML files, and refuses those that can't run, in a moment.

Nothing is imported that a pipeline names: engines and transfer adapters are the workers' affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines import catalog, overrides, plain, whole
from pipelines.checks import check
from pipelines.decode import decode
from pipelines.errors import PipelineError, choices
from pipelines.graph import Pipeline
from pipelines.overrides import Override

__all__ = ["PipelineError", "find", "load", "load_all"]


def load(name: str | Path, stage_overrides: Sequence[str] = (), models: Sequence[str] = ()) -> Pipeline:
    """Loads one pipeline.

    Args:
        name: A pipeline that ships ("voice", "echo"), a YAML file, or a folder with a pipeline.yaml.
        stage_overrides: Settings like "thinker.max_num_seqs=32"; later ones win.
        models: Models for all stages that have one, see :mod:`pipelines.whole`; a stage's setting wins.

    Raises :class:`PipelineError`, whose message names file, key, value and what is allowed.
    """
    return load_all([name], stage_overrides, models)[0]


def load_all(
    names: Sequence[str | Path],
    stage_overrides: Sequence[str] = (),
    models: Sequence[str] = (),
    *,
    teacache: bool = False,
) -> list[Pipeline]:
    """Loads the pipelines that one broker serves. An override goes to each of them that has its stage.

    ``teacache``: every stage whose ``cache_coefficients`` are known uses it, unless it names another cache.

    Raises :class:`PipelineError`, also when two of them carry one name, an override has no stage, or no stage
    can use TeaCache although it shall.
    """
    files = [find(name) for name in names]
    documents = [_read(file) for file in files]
    for model in models:
        whole.apply(model, documents)
    _override([overrides.parse(text) for text in stage_overrides], documents)
    if teacache:
        _enable_teacache(documents)
    pipelines: list[Pipeline] = []
    for file, document in zip(files, documents, strict=True):
        try:
            pipeline = decode(document, Pipeline)
            check(pipeline)
        except PipelineError as error:
            raise error.within(str(file)) from None
        if any(other.name == pipeline.name for other in pipelines):
            problem = f"{pipeline.name!r} is another pipeline's name already"
            raise PipelineError(problem, key="name", file=str(file))
        pipelines.append(pipeline)
    return pipelines


def find(name: str | Path) -> Path:
    """The file behind a name or path. Raises :class:`PipelineError` when there is none."""
    shipped = catalog.pipelines()
    if str(name) in shipped:
        return shipped[str(name)]
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "pipeline.yaml").is_file():
            raise PipelineError("there is no pipeline.yaml in this folder", file=str(name))
        path = path / "pipeline.yaml"
    if path.is_file():
        return path
    raise PipelineError(
        f"no such file, and no pipeline of that name; {choices(name, shipped)}", file=str(name)
    )


def _read(file: Path) -> dict[str, Any]:
    """The file's plain data, checked as far as overrides rely on it."""
    try:
        with file.open("rb") as stream:
            document = plain.read(stream.read(plain.MAX_BYTES + 1))
        if not isinstance(document, dict):
            raise PipelineError("expected a map with name, outputs, stages and edges")
        _prepare_stages(document, file.parent)
    except OSError as error:
        raise PipelineError(f"can't be read: {error.strerror}", file=str(file)) from None
    except PipelineError as error:
        raise error.within(str(file)) from None
    return document


def _prepare_stages(document: dict[str, Any], folder: Path) -> None:
    """Makes sure that overrides find maps, and makes the folders of models absolute."""
    stages = document.setdefault("stages", {})
    if not isinstance(stages, dict):
        raise PipelineError(f"{stages!r}: expected a map from a name to a stage", key="stages")
    for name, stage in stages.items():
        if not isinstance(stage, dict):
            raise PipelineError(f"{stage!r}: expected a map with engine and model", key=f"stages.{name}")
        if isinstance(stage.get("model"), str):
            stages[name] = stage | {"model": catalog.absolute(stage["model"], folder)}


def _override(settings: list[Override], documents: list[dict[str, Any]]) -> None:
    settings = sorted(settings, key=lambda item: item.key != "engine")  # it decides which options there are
    for setting in settings:
        chosen = [document for document in documents if setting.fits(document)]
        if not chosen:
            several = len(documents) > 1
            names = [
                f"{d.get('name')}/{name}" if several else name for d in documents for name in d["stages"]
            ]
            wanted = f"{setting.pipeline}/{setting.stage}" if setting.pipeline else setting.stage
            problem = f"no stage {wanted!r}; {choices(wanted, names)}"
            raise PipelineError(problem, file=f"--stage {setting.text}")
        for document in chosen:
            overrides.apply(setting, document)


def _enable_teacache(documents: list[dict[str, Any]]) -> None:
    found = False
    for document in documents:
        for name, stage in document["stages"].items():
            options = stage.get("options")
            if isinstance(options, dict) and options.get("cache_coefficients"):
                found = True
                # A copy, since YAML's aliases let stages share a map.
                document["stages"][name] = stage | {"options": {"cache": "teacache"} | options}
    if not found:
        raise PipelineError(
            "no stage has cache_coefficients, which belong to a model; scripts/calibrate_teacache finds "
            "them, and --stage denoiser.cache_coefficients=[...] sets them",
            file="--enable-teacache",
        )
