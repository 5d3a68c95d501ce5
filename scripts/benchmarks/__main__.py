"""Finds the benchmark that ``scripts/bench`` was asked for."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

_SUPPORT = {"__init__", "__main__", "callers", "common", "deaths", "hosts", "house", "lan", "stack"}


def benchmarks() -> dict[str, str]:
    """Name -> the first line of its docstring, without importing any."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return {file.stem: _first_line(file) for file in files if file.stem not in _SUPPORT}


def _first_line(file: Path) -> str:
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


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
    importlib.import_module(f"scripts.benchmarks.{name}").main(argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
