"""Server-sent events: one ``data:`` line and a blank line each, never faster than the client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from broker.gateway.errors import from_exception

DONE = b"data: [DONE]\n\n"


class ClientStalled(ConnectionError):
    """The client takes nothing any more; its request is given up."""


class Body:
    """A response body that is sent piece by piece.

    The headers leave with the first piece, so that whatever fails before can still be a plain error
    response with a status of its own.

    Args:
        request: The HTTP request that is answered.
        content_type: Of the response.
        stall_s: A write that waits longer than this raises :class:`ClientStalled`.
        headers: More response headers.
    """

    def __init__(
        self,
        request: web.Request,
        content_type: str,
        stall_s: float,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._request = request
        self._stall_s = stall_s
        self._lock = asyncio.Lock()
        self.response = web.StreamResponse(headers={"Content-Type": content_type, **(headers or {})})

    @property
    def started(self) -> bool:
        """Whether the headers are out."""
        return self.response.prepared

    async def write(self, data: bytes) -> None:
        """Sends a piece and waits while the client reads slower than we write. Several tasks may write."""
        try:
            async with self._lock, asyncio.timeout(self._stall_s):
                if not self.response.prepared:
                    await self.response.prepare(self._request)
                await self.response.write(data)
        except TimeoutError:
            self.cut()
            raise ClientStalled(f"the client read nothing for {self._stall_s:g} s") from None

    def cut(self) -> None:
        """Closes the connection without an orderly end: the client sees that something is missing."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def finish(self) -> web.StreamResponse:
        """Ends the body."""
        await self.response.write_eof()
        return self.response


class Events(Body):
    """A stream of events."""

    def __init__(self, request: web.Request, stall_s: float) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(request, "text/event-stream; charset=utf-8", stall_s, headers)

    async def send(self, data: bytes) -> None:
        """Sends one event; ``data`` is a JSON text without line breaks."""
        await self.write(b"data: " + data + b"\n\n")

    @asynccontextmanager
    async def whole(self, request_id: str) -> AsyncIterator[None]:
        """Around all that sends events; it ends the stream.

        An error before the first event is raised, a later one is sent as an error object: nothing that looks
        like an orderly end follows that.
        """
        try:
            yield
            await self.finish()
        except ConnectionError:
            raise
        except Exception as error:
            if not self.started:
                raise
            await self.send(from_exception(error).body(request_id))
            await self.finish()
