"""Connections over which nobody asks for anything are closed: each is an open file, and those are counted."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

LOOKS = 4  #: in the time that a caller has


class Silence:
    """Closes connections whose first request has not come, or only a part of its head.

    aiohttp waits for ever for the first one; for the next it has a limit of its own.

    Args:
        limit_s: How long a caller may be silent.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._heard: set[RequestHandler] = set()

    @web.middleware
    async def hear(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The first of the middlewares: whoever gets so far has asked for something."""
        self._heard.add(request.protocol)
        return await handler(request)

    async def end(self, server: web.Server) -> None:
        """Looks at a server's connections until it is cancelled."""
        since: dict[RequestHandler, float] = {}
        while True:
            now = time.monotonic()
            there = set(server.connections)
            self._heard &= there
            since = {connection: since.get(connection, now) for connection in there - self._heard}
            for connection, began in since.items():
                if now - began >= self._limit_s:
                    connection.force_close()
            await asyncio.sleep(self._limit_s / LOOKS)
