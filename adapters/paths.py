"""Walking through a payload, with a path for messages: ``payload.frames[3].text``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ROOT = "payload"  #: what every path starts with


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a dict, list or tuple, each with its step in a path: ``.name`` or ``[3]``."""
    if isinstance(value, dict):
        yield from ((f".{key}", child) for key, child in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", child) for number, child in enumerate(value))


def path_of(wanted: object, value: Any, path: str = ROOT) -> str | None:
    """Where in a payload this very object is, or None."""
    if value is wanted:
        return path
    found = (path_of(wanted, child, path + step) for step, child in children(value))
    return next(filter(None, found), None)
