"""What a worker tells the broker of an attempt that raised."""

from __future__ import annotations

from adapters.handle import AdapterError, ArenaFull, Unreachable
from broker.protocol import Error, Failed
from workers.engine import ItemError


def failure(attempt: tuple[int, int, int], stage: str, error: Exception) -> Failed:
    """The message: whose fault it was, in the caller's words where the caller can do something about it."""
    if isinstance(error, ItemError):
        kind = "invalid_request_error" if error.status < 500 else "stage_failed"
        return Failed(*attempt, "item", Error(kind, f"stage {stage}: {error}", error.status, error.param))
    kind, status = "stage_failed", 500
    if isinstance(error, ArenaFull):
        kind, status = "overloaded", 503
    elif isinstance(error, Unreachable):
        kind, status = "unreachable", 503
    return Failed(*attempt, "item", Error(kind, f"stage {stage}: {type(error).__name__}: {error}", status))


def is_known(error: Exception) -> bool:
    """Whether its kind says what happened, so that nobody needs a traceback."""
    return isinstance(error, ItemError | AdapterError)
