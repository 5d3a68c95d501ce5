"""How much of what callers sent one gateway holds decoded, before it lies in shared memory."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from broker.gateway.errors import ApiError


class Room:
    """Counts arrays for as long as they live: those of waiting requests, too, whatever becomes of them.

    Args:
        megabytes: MiB that all may have together.
    """

    def __init__(self, megabytes: float) -> None:
        self._most = megabytes * 2**20
        self._held = 0

    def hold(self, array: np.ndarray[Any, Any]) -> None:
        """Counts an array. Raises ApiError (503) where there is no room for it now."""
        if self._held + array.nbytes > self._most:
            raise ApiError(
                f"this gateway holds {self._held >> 20} MiB of media; at most {self._most / 2**20:g}",
                status=503,
                code="overloaded",
                retry_after_s=1.0,
            )
        self._held += array.nbytes
        weakref.finalize(array, self._give_back, array.nbytes).atexit = False

    def _give_back(self, nbytes: int) -> None:
        self._held -= nbytes
