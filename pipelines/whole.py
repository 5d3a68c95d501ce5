"""One model for a whole pipeline, from the command line: ``--model Qwen/Qwen2.5-Omni-3B``.

It goes to every stage of the pipeline that names a model: the parts of a model that is really several lie in
one folder. With several pipelines ``qwen2_5_omni=NAME`` says whose it is. ``tiny-random`` is the small random
model of the pipeline's architecture in the catalogue, for trials and tests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines import catalog
from pipelines.errors import ModelError, PipelineError, choices

TINY = "tiny-random"  #: stands for the catalogue's model "<pipeline>-tiny-random"

_NAMED = re.compile(r"([a-z][a-z0-9_-]*)=(.+)", re.DOTALL)


def apply(text: str, documents: Sequence[dict[str, Any]]) -> None:
    """Sets the model in the plain data of the pipeline that is meant.

    Args:
        text: ``NAME``, or ``PIPELINE=NAME``; a catalogue name, a Hugging Face id or a folder.
        documents: The pipelines that are loaded.

    Raises :class:`PipelineError` where it is not clear whose it is, or it is no model.
    """
    where = f"--model {text}"
    names = [str(document.get("name")) for document in documents]
    named = _NAMED.fullmatch(text)
    pipeline, model = (named[1], named[2]) if named else ("", text)
    if not pipeline and len(documents) > 1:
        raise PipelineError(f"whose? Say PIPELINE=NAME with one of {', '.join(names)}", file=where)
    if pipeline and pipeline not in names:
        raise PipelineError(f"no pipeline {pipeline!r}; {choices(pipeline, names)}", file=where)
    document = documents[names.index(pipeline) if pipeline else 0]
    model = _resolved(model, str(document.get("name")), where)
    stages = document["stages"]
    chosen = [name for name, stage in stages.items() if stage.get("model") is not None]
    if not chosen:
        raise PipelineError(f"no stage of {document.get('name')} has a model", file=where)
    for name in chosen:
        stages[name] = stages[name] | {"model": model}


def _resolved(model: str, pipeline: str, where: str) -> str:
    if model == TINY:
        tiny = [name.removesuffix(f"-{TINY}") for name in catalog.MODELS if name.endswith(f"-{TINY}")]
        if pipeline not in tiny:
            allowed = ", ".join(tiny) or "none"
            raise PipelineError(f"{pipeline} has no such model; pipelines with one: {allowed}", file=where)
        return f"{pipeline}-{TINY}"
    model = catalog.absolute(model, Path.cwd())
    try:
        folder = Path(model).expanduser() if catalog.kind(model) == "folder" else None
    except ModelError as error:
        raise PipelineError(str(error), file=where) from None
    if folder is not None and folder.is_dir() and not any(folder.iterdir()):
        problem = "this folder is empty; a model's has its configuration and its weights"
        raise PipelineError(problem, file=where)
    return model
