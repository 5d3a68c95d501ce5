"""Libraries that only some engines need, imported when they are."""

from __future__ import annotations

import importlib
from typing import Any

from pipelines.telemetry import no_telemetry


class MissingLibrary(RuntimeError):
    """An optional library can't be imported; the message says why, and the command that installs it."""


def library(module: str, extra: str) -> Any:
    """Imports a module of an optional library, which is told not to report.

    Raises :class:`MissingLibrary` naming the extra of omni-broker that brings it.
    """
    no_telemetry()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingLibrary(f"{module}: {error}; run: pip install 'omni-broker[{extra}]'") from error
