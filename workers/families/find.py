"""Finding a family's class by the name that an option gives."""

from __future__ import annotations

import importlib
from typing import Any


def find_class(name: str) -> Any:
    """What "package.module:Class" names. Raises ValueError where there is no such module or class."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"options.family: {name!r}: {error}") from error


def refuse(options: Any, *names: str) -> None:
    """Raises ValueError for an option that is set although the family has no use for it."""
    for name in names:
        if getattr(options, name):
            raise ValueError(f"options.{name}: has no effect with {options.family}")
