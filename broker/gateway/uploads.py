"""What callers send along: its bytes, and the work of decoding them off the event loop."""

from __future__ import annotations

import asyncio
import base64
import binascii
import threading
from collections.abc import Callable
from typing import TypeVar

from broker.gateway.errors import ApiError
from broker.gateway.fetch import Fetcher

T = TypeVar("T")

_slots = asyncio.Semaphore(2)  # decoding is work for a processor: more at once would only be slower


async def load(text: str, field: str, fetcher: Fetcher) -> bytes:
    """The bytes that strict base64, a base64 data URI or a link stands for.

    Raises ApiError for anything else (a path, wrong padding), and 413 for more than the fetcher may get.
    """
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ApiError(f"{field}: a data URI must be base64", field, code="invalid_base64")
    elif ":" in text[:16]:
        return await fetcher.get(text, field)
    if len(text) * 3 // 4 > fetcher.max_bytes + 2:
        raise ApiError(
            f"{field}: larger than {fetcher.max_bytes} bytes",
            field,
            status=413,
            code=f"{fetcher.what}_too_large",
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(f"{field}: not valid base64: {error}", field, code="invalid_base64") from None


async def in_thread(work: Callable[[threading.Event], T]) -> T:
    """Runs ``work`` in a thread; the event that it gets is set when nobody waits for it any more."""
    stop = threading.Event()
    async with _slots:
        try:
            return await asyncio.to_thread(work, stop)
        finally:
            stop.set()  # a cancelled request's thread ends at its next frame


class Pixels:
    """What a request may still show: the pixels of all its pictures and frames share one allowance.

    Args:
        megapixels: The allowance.
    """

    def __init__(self, megapixels: float) -> None:
        self._most = int(megapixels * 1e6)
        self._taken = 0

    def take(self, pixels: int, field: str) -> None:
        """Raises ApiError (413) where there are too many with these."""
        self._taken += pixels
        if self._taken > self._most:
            raise ApiError(
                f"{field}: more than {self._most / 1e6:g} megapixels in the request's pictures and frames",
                field,
                status=413,
                code="too_many_pixels",
            )
