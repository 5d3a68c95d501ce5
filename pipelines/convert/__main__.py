"""Runs one converter: ``python -m pipelines.convert NAME SOURCE TARGET``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from pipelines.convert import MISSING_LIBRARY
from pipelines.telemetry import no_telemetry


def main(arguments: list[str]) -> int:
    """Returns the exit code; the last line on standard error says what went wrong."""
    name, source, target = arguments
    no_telemetry()
    try:
        importlib.import_module(f"pipelines.convert.{name}").convert(Path(source), Path(target))
    except ImportError as error:
        print(error, file=sys.stderr)
        return MISSING_LIBRARY
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
