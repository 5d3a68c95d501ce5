"""A request's parameters for one stage, checked."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from workers.engine import ItemError

T = TypeVar("T")


def checked(params: dict[str, Any], kind: type[T]) -> T:
    """The parameters as a struct. Those that it does not have are not this engine's, and left alone.

    Raises :class:`ItemError` (400) with ``param`` set for a wrong type or a value out of bounds.
    """
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`") or None
        raise ItemError(f"{name or 'parameters'}: {problem}", status=400, param=name) from None
