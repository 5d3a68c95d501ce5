"""Settings of single stages from the command line: ``--stage thinker.max_num_seqs=32``.

A key is looked up by its bare name among the stage's own fields, ``batch``, ``resources``, ``retry`` and its
engine's options, so the names that vLLM's users know work as they are; ``batch.max_num_seqs`` and
``options.dtype`` say the same in full. Dashes equal underscores. ``voice/thinker.max_num_seqs=32`` sets it in
one of several pipelines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipelines import catalog, plain
from pipelines.decode import fields
from pipelines.errors import PipelineError, choices
from pipelines.graph import Batch, Resources, Retry, Stage
from pipelines.options import ENGINES

_SECTIONS: dict[str, type[msgspec.Struct]] = {"batch": Batch, "resources": Resources, "retry": Retry}


class Override(NamedTuple):
    """One parsed ``stage.key=value``."""

    pipeline: str  #: "" for any that has the stage
    stage: str
    key: str
    value: Any
    text: str  #: as it was given, for messages

    def fits(self, document: dict[str, Any]) -> bool:
        """Whether a pipeline's plain data has the stage that is meant."""
        return self.pipeline in ("", document.get("name")) and self.stage in document["stages"]


def parse(text: str) -> Override:
    """Parses ``stage.key=value``; the value is YAML. Raises :class:`PipelineError`."""
    name, equals, value = text.partition("=")
    owner, dot, key = name.strip().partition(".")
    pipeline, _, stage = owner.rpartition("/")
    where = f"--stage {text}"
    if not (equals and dot and stage and key):
        raise PipelineError("expected stage.key=value, like thinker.max_num_seqs=32", file=where)
    try:
        parsed = plain.read(value)
    except PipelineError as error:
        raise error.within(where) from None
    return Override(pipeline, stage, key.strip().replace("-", "_"), parsed, text)


def apply(override: Override, document: dict[str, Any]) -> None:
    """Sets the value in a pipeline's plain data. Raises :class:`PipelineError` for an unknown key."""
    stage = document["stages"][override.stage]
    places = _places(stage.get("engine"))
    path = places.get(override.key)
    free = "." in override.key and stage.get("engine") not in ENGINES  # an engine of the user's own
    if path is None and free and override.key.startswith("options."):
        path = ("options", override.key.removeprefix("options."))
    if path is None:
        allowed = choices(override.key, [name for name in places if "." not in name])
        raise PipelineError(f"unknown key {override.key!r}; {allowed}", file=f"--stage {override.text}")
    value = override.value
    if path == ("model",) and isinstance(value, str):
        value = catalog.absolute(value, Path.cwd())
    # Copies on the way, since YAML's aliases let stages share a map.
    stage = document["stages"][override.stage] = dict(stage)
    if len(path) == 2:
        section = stage.get(path[0])
        stage[path[0]] = {**section, path[1]: value} if isinstance(section, dict) else {path[1]: value}
    else:
        stage[path[0]] = value


def _places(engine: Any) -> dict[str, tuple[str, ...]]:
    """Every name of every setting of a stage with this engine, and where it lies."""
    places: dict[str, tuple[str, ...]] = {
        name: (name,) for name in fields(Stage) if name not in (*_SECTIONS, "options")
    }
    sections = dict(_SECTIONS)
    if engine in ENGINES:
        sections["options"] = ENGINES[engine].options
    for section, kind in sections.items():
        for name in fields(kind):
            places.setdefault(name, (section, name))
            places[f"{section}.{name}"] = (section, name)
    return places
