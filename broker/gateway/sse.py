"""Bodies that are sent piece by piece, as events or raw bytes, never faster than the client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from broker.gateway.errors import from_exception
from broker.gateway.patience import while_taken
from broker.gateway.places import Place

DONE = b"[DONE]"


class Reader(msgspec.Struct, frozen=True):
    """Who an answer is streamed to.

    Attributes:
        stall_s: A reader that takes nothing for so long is cut off, see :mod:`broker.gateway.patience`.
        place: Where it wants to go on.
        ids: Whether events carry an ``id`` line. Only for readers that ask for them: some load generators
            take each event for one line, and fail at a second one.
    """

    request: web.Request
    stall_s: float
    place: Place
    ids: bool


class Body:
    """A response body that is sent piece by piece.

    The headers leave with the first piece, so that whatever fails before can still be a plain error
    response with a status of its own.

    Args:
        reader: Whose request is answered.
        content_type: Of the response.
        headers: More response headers.
    """

    def __init__(self, reader: Reader, content_type: str, headers: dict[str, str] | None = None) -> None:
        self._request = reader.request
        self._stall_s = reader.stall_s
        self._lock = asyncio.Lock()
        self.response = web.StreamResponse(headers={"Content-Type": content_type, **(headers or {})})

    @property
    def started(self) -> bool:
        """Whether the headers are out."""
        return self.response.prepared

    async def begin(self) -> None:
        """Sends the headers, if they are not out yet."""
        if not self.response.prepared:
            await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Sends a piece and waits while the client reads slower than we write. Several tasks may write."""
        # The watch begins inside the lock: while others write it is not this client that is slow.
        async with self._lock, while_taken(self._request, self._stall_s, len(data)):
            await self.begin()
            await self.response.write(data)

    def cut(self) -> None:
        """Closes the connection without an orderly end: the client sees that something is missing."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def finish(self) -> web.StreamResponse:
        """Ends the body."""
        async with while_taken(self._request, self._stall_s, 0):
            await self.begin()
            await self.response.write_eof()
        return self.response


class RawBody(Body):
    """Bytes, without those that the reader has already."""

    def __init__(self, reader: Reader, content_type: str) -> None:
        super().__init__(reader, content_type)
        (self._skip,) = reader.place.after

    async def write(self, data: bytes) -> None:
        """See :class:`Body`."""
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        if skipped < len(data):
            await super().write(data[skipped:])


class Events(Body):
    """Events: one ``data`` line and a blank line each, with an ``id`` line before for whoever wants it."""

    def __init__(self, reader: Reader) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(reader, "text/event-stream; charset=utf-8", headers)
        self._place = reader.place
        self._ids = reader.ids

    async def send(self, data: bytes, lane: int = 0) -> None:
        """Sends one event, unless the reader has it already; ``data`` holds no line break."""
        if self._place.step(lane):
            # The id is made before the first wait, so ids leave in the order in which they count.
            head = f"id: {self._place}\ndata: ".encode() if self._ids else b"data: "
            await self.write(head + data + b"\n\n")

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
            await self.write(b"data: " + from_exception(error).body(request_id) + b"\n\n")
            await self.finish()
