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
AT_ONCE = 32 << 10  #: bytes that can be written to a transport that holds none without waiting for the client


class ClientStalled(ConnectionError):
    """The client takes nothing any more; its request is given up."""


@asynccontextmanager
async def while_taken(request: web.Request, stall_s: float, size: int) -> AsyncIterator[None]:
    """Around the writing of so many bytes: it may last for as long as the client takes some now and then.

    Raises ClientStalled for one that takes nothing for ``stall_s``, whose connection is closed without an
    orderly end: it sees that something is missing.
    """
    if goes_at_once(request, size):
        yield
        return
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


def goes_at_once(request: web.Request, size: int) -> bool:
    """Whether so many bytes can be written without waiting for the client. Mostly it is so."""
    transport = request.transport
    return size < AT_ONCE and transport is not None and not transport.get_write_buffer_size()


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
