"""Models by name: pulled, checked and converted on first use, then from the cache."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import NamedTuple

from pipelines import catalog
from pipelines.cache import Entry, cache_dir
from pipelines.catalog import MODELS, Model
from pipelines.errors import ModelError, choices
from pipelines.fetch import fetch
from pipelines.progress import Progress, Step, quiet

__all__ = ["ModelError", "ModelInfo", "cache_dir", "ensure", "list_models", "pull"]


class ModelInfo(NamedTuple):
    """A model of the catalogue, and whether it is here already."""

    model: Model
    cached: bool
    path: Path
    bytes: int  #: on the disk; 0 if it isn't cached


def list_models() -> list[ModelInfo]:
    """All models of the catalogue."""
    infos = []
    for model in MODELS.values():
        entry = Entry(model)
        cached = entry.intact()
        infos.append(ModelInfo(model, cached, entry.path, entry.size() if cached else 0))
    return infos


def ensure(model: str, progress: Progress = quiet, *, verify: bool = False) -> Path:
    """Where a stage's model lies.

    A catalogue name is pulled if it isn't cached, or if its cache is broken (sizes are always looked at,
    with ``verify`` every byte); a folder is itself; anything else must be a Hugging Face id and comes back
    unchanged, since engines resolve those themselves. It blocks, for minutes at worst.

    Raises :class:`ModelError` with the cause and the cure.
    """
    if catalog.kind(model) == "catalogue":
        return pull(model, progress, verify=verify)
    return Path(model).expanduser()


def pull(name: str, progress: Progress = quiet, *, verify: bool = True) -> Path:
    """Makes sure that a model of the catalogue is cached. Raises :class:`ModelError`."""
    if name not in MODELS:
        raise ModelError(f"no model {name!r} in the catalogue; {choices(name, MODELS)}")
    entry = Entry(MODELS[name])
    if entry.intact(hashes=verify):
        return entry.path

    def wait() -> None:
        progress(Step(name, "wait for another process that pulls it"))

    try:
        with entry.lock(wait):
            if not entry.intact(hashes=verify):
                with entry.build() as build:
                    made = fetch(entry.model, build, progress)
                    progress(Step(name, "store"))
                    entry.publish(made, build)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            cure = "make room, or set OMNI_CACHE to another folder"
        else:
            cure = "set OMNI_CACHE to a folder that you may write to"
        raise ModelError(f"{name} can't be stored in {cache_dir()}: {error.strerror}; {cure}") from error
    progress(Step(name, "ready"))
    return entry.path
