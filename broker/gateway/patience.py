"""Waiting for clients that read slowly, and for no others."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiohttp import web

LOOKS = 4  #: in the time that a client has


class ClientStalled(ConnectionError):
    """The client takes nothing any more; its request is given up."""


@asynccontextmanager
async def while_taken(request: web.Request, stall_s: float) -> AsyncIterator[None]:
    """Around what is written: it may last for as long as the client takes some of it now and then.

    Raises ClientStalled for one that takes nothing for ``stall_s``, whose connection is closed without an
    orderly end: it sees that something is missing.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(stall_s) as limit:
            timer: asyncio.TimerHandle

            def look(before: int) -> None:
                nonlocal timer
                left = unread(request.transport)
                if left < before and not limit.expired():
                    limit.reschedule(loop.time() + stall_s)
                timer = loop.call_later(stall_s / LOOKS, look, left)

            timer = loop.call_later(stall_s / LOOKS, look, 0)
            try:
                yield
            finally:
                timer.cancel()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ClientStalled(f"the client read nothing for {stall_s:g} s") from None


def unread(transport: asyncio.Transport | None) -> int:
    """Bytes that were written and have not reached the client yet: ours, and those that the kernel holds.

    The kernel may hold megabytes, and asks for more only when a third of them is gone.
    """
    if transport is None:
        return 0
    left = transport.get_write_buffer_size()
    with suppress(OSError, AttributeError):  # it is being closed
        number = transport.get_extra_info("socket").fileno()
        left += int.from_bytes(fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return left
