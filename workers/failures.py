"""What a worker tells the broker of an attempt that raised."""

from __future__ import annotations

from adapters.handle import AdapterError, ArenaFull, BadHandle, Unreachable
from broker.protocol import Error, Failed
from workers.engine import ItemError

AGAIN_S = 1.0  #: a caller may ask again after so long

#: What neither the item nor the stage can help.
_NOBODYS_FAULT: dict[type[AdapterError], str] = {
    ArenaFull: "overloaded",
    Unreachable: "unreachable",
    BadHandle: "input_lost",  # whoever had it says that it is gone, or it is damaged
}


def failure(attempt: tuple[int, int, int], stage: str, error: Exception) -> Failed:
    """The message: whose fault it was, in the caller's words where the caller can do something about it."""
    if isinstance(error, ItemError):
        kind = "invalid_request_error" if error.status < 500 else "stage_failed"
        return Failed(*attempt, "item", Error(kind, f"stage {stage}: {error}", error.status, error.param))
    text = f"stage {stage}: {type(error).__name__}: {error}"
    for what, kind in _NOBODYS_FAULT.items():
        if isinstance(error, what):
            # What is lost stays lost, but the same request anew makes it anew.
            again = AGAIN_S if error.retryable or kind == "input_lost" else None
            return Failed(*attempt, "item", Error(kind, text, 503, retry_after_s=again))
    return Failed(*attempt, "item", Error("stage_failed", text))


def is_known(error: Exception) -> bool:
    """Whether its kind says what happened, so that nobody needs a traceback."""
    return isinstance(error, ItemError | AdapterError)
