"""Libraries that only some engines need, imported when they are."""

from __future__ import annotations

import importlib
import os
from typing import Any

#: Some of these libraries report to their makers by default. A user who wants that sets the variable.
TELEMETRY_OFF = {
    "ORT_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


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


def no_telemetry() -> None:
    """Asks libraries that are imported later to report nothing."""
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)
