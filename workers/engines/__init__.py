"""The stage engines, each imported only by the worker that runs it."""

from __future__ import annotations

import importlib

from pipelines.options import ENGINES
from workers.config import EngineConfig
from workers.engine import Engine


def find_engine(name: str) -> type[Engine]:
    """The class of a built-in engine's name or of "module:Class"."""
    where = ENGINES[name].implementation if name in ENGINES else name
    module, _, attribute = where.partition(":")
    engine: type[Engine] = getattr(importlib.import_module(module), attribute)
    return engine


def make_engine(settings: EngineConfig) -> Engine:
    """The stage's engine, with the batching that the edges into the stage ask for. It is not started."""
    stage = settings.pipeline.batching(settings.stage)
    return find_engine(stage.engine)(stage, device=settings.device)
