"""Who decides: the broker, its clients and its front. ``from broker import Omni`` is the Python API."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.api import Omni

__all__ = ["Omni"]


def __getattr__(name: str) -> Any:
    """Imports the API when it is asked for, so that the processes of the broker stay light."""
    if name == "Omni":
        from broker.api import Omni

        return Omni
    raise AttributeError(f"module 'broker' has no attribute {name!r}")
