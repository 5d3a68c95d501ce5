"""A film as a file, once all of it is there."""

from __future__ import annotations

import numpy as np
from aiohttp import web

from broker.client import RequestStream
from broker.gateway.errors import ApiError
from broker.gateway.sse import RawBody, Reader

CONTENT_TYPE = "video/mp4"


async def respond(reader: Reader, stream: RequestStream) -> web.StreamResponse:
    """The file for a reader that may have a part of it."""
    data = await _file(stream)
    out = RawBody(reader, CONTENT_TYPE)
    await out.write(data)
    return await out.finish()


async def whole(stream: RequestStream) -> web.Response:
    """The file."""
    return web.Response(body=await _file(stream), content_type=CONTENT_TYPE)


async def part(request: web.Request, stream: RequestStream) -> web.Response:
    """The part of the file that the header Range names: players ask for parts (RFC 9110, 14).

    Without the header: all of it.
    """
    data = await _file(stream)
    headers = {"Accept-Ranges": "bytes"}
    try:
        asked = request.http_range
    except ValueError:  # another unit, or several parts: a server need not understand these
        asked = slice(None, None, 1)
    if asked == slice(None, None, 1):
        return web.Response(body=data, content_type=CONTENT_TYPE, headers=headers)
    first, end, _ = asked.indices(len(data))
    if first >= end:
        return web.Response(status=416, headers={"Content-Range": f"bytes */{len(data)}"})
    headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
    return web.Response(status=206, body=data[first:end], content_type=CONTENT_TYPE, headers=headers)


async def _file(stream: RequestStream) -> bytes:
    payloads = [payload async for _, payload in stream]
    file = payloads[-1].get("mp4") if payloads else None
    if not isinstance(file, np.ndarray) or file.dtype != np.uint8 or file.ndim != 1:
        problem = "the pipeline gave no film; the stage that makes one has the engine film"
        raise ApiError(problem, status=500, code="bad_output")
    return file.tobytes()
