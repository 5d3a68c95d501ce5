"""A film as a file, once all of it is there."""

from __future__ import annotations

from aiohttp import web

from broker.client import RequestStream
from broker.gateway import prints
from broker.gateway.sse import RawBody, Reader

CONTENT_TYPE = "video/mp4"


async def respond(reader: Reader, stream: RequestStream) -> web.StreamResponse:
    """The file for a reader that may have a part of it."""
    data = await _film(stream)
    out = RawBody(reader, CONTENT_TYPE)
    await out.write(data)
    return await out.finish()


async def whole(stream: RequestStream) -> web.Response:
    """The file."""
    return web.Response(body=await _film(stream), content_type=CONTENT_TYPE)


async def _film(stream: RequestStream) -> bytes:
    return await prints.film([payload async for _, payload in stream])
