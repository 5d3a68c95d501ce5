"""Finds the benchmark that ``scripts/bench`` was asked for."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

from pipelines.telemetry import no_telemetry


def benchmarks() -> dict[str, str]:
    """Name -> the first line of its docstring, of the modules here that have a ``main``. Imports none."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("[!_]*.py")):
        module = ast.parse(file.read_text())
        if any(isinstance(part, ast.FunctionDef) and part.name == "main" for part in module.body):
            found[file.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def usage() -> str:
    """The help text."""
    lines = [f"  {name:<10} {line}" for name, line in benchmarks().items()]
    return "\n".join(
        ["Usage: scripts/bench NAME [options]; scripts/bench NAME --help lists its options.", "", *lines]
    )


def main() -> int:
    """Runs the benchmark named first on the command line."""
    name, *argv = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in benchmarks():
        print(f"no benchmark {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    no_telemetry()
    importlib.import_module(f"scripts.benchmarks.{name}").main(argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
