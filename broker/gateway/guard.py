"""What stands before every handler: ids, keys, bounds, and an error body for whatever goes wrong."""

from __future__ import annotations

import difflib
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware

from broker.gateway.context import Context
from broker.gateway.errors import ApiError, from_exception
from broker.gateway.patience import AT_ONCE, goes_at_once, while_taken

log = logging.getLogger("gateway")

PROBES = ("/health", "/ready")  #: always answered, whoever asks and however much there is to do


def make_guard(context: Context) -> Middleware:
    """The middleware that names each request, lets it in, counts it, and gives every failure an error body.

    The id is always our own: a caller's `x-request-id` names nothing here, so two callers may send the same.
    """
    doors = Doors(context)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        request["id"] = secrets.token_hex(12)
        request["started"] = time.perf_counter()
        status = "disconnected"
        try:
            with doors.enter(request):
                await _let_come(request)
                response = await handler(request)
                size = _size(response)
                if not goes_at_once(request, size):  # else aiohttp does the same
                    async with while_taken(request, context.settings.stall_s, size):
                        await response.prepare(request)
                        await response.write_eof()
            status = str(response.status)
        except ConnectionError:
            # The client has gone, or was cut off. This goes nowhere, but aiohttp logs what is raised instead.
            response = web.Response(status=499)
        except Exception as error:
            failure = _failure(error, request)
            response = web.Response(
                body=failure.body(request["id"]),
                status=failure.status,
                content_type="application/json",
                headers=failure.headers(),
            )
            status = str(failure.status)
        finally:
            endpoint = request.match_info.route.resource
            path = endpoint.canonical if endpoint is not None else "other"
            context.metrics.answers.labels(path, status).inc()
            if log.isEnabledFor(logging.DEBUG):
                elapsed = time.perf_counter() - request["started"]
                log.debug("%s %s %s %s in %.3f s", request["id"], request.method, path, status, elapsed)
        return response

    return guard


def _size(response: web.StreamResponse) -> int:
    """Bytes that are still to be written, or more."""
    body = response.body if isinstance(response, web.Response) else b""  # one that is streamed is out
    return len(body) if isinstance(body, bytes | bytearray) else AT_ONCE


class Doors:
    """Decides from a request's head alone whether it may come in: nothing of its body has been read."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._inside = 0

    @contextmanager
    def enter(self, request: web.Request) -> Iterator[None]:
        """Around a request's handling.

        Raises ApiError: 401 without a key, 413 for a body that says it is too large, 415 for a compressed
        one, 429 or 503 without room.
        """
        if request.path in PROBES:
            yield
            return
        request["tenant"] = self._context.keys.tenant(request.headers)
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ApiError("compressed bodies are not taken: send it as it is", status=415, code="compressed")
        if (request.content_length or 0) > request.client_max_size:
            raise _too_large(request.client_max_size)
        most = self._context.settings.max_open
        if self._inside >= most:
            raise ApiError(
                f"this gateway handles {most} requests already",
                status=503,
                code="overloaded",
                retry_after_s=1.0,
            )
        if request.method == "POST":
            self._context.link.refuse_if_all_busy()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1


def _failure(error: Exception, request: web.Request) -> ApiError:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return _too_large(request.client_max_size)
    if isinstance(error, web.HTTPMethodNotAllowed):
        allow = ", ".join(sorted(error.allowed_methods))
        return ApiError(
            f"{request.path[:80]} takes {allow}, not {request.method[:20]}",
            status=405,
            code="method_not_allowed",
            allow=allow,
        )
    if isinstance(error, web.HTTPNotFound):
        return ApiError(f"there is no {request.path[:80]} here{_near(request)}", status=404, code="not_found")
    if isinstance(error, web.HTTPException):
        return ApiError(error.reason, status=error.status, code=error.reason.lower().replace(" ", "_"))
    return from_exception(error)


def _too_large(most: int) -> ApiError:
    return ApiError(f"the body is larger than the {most} bytes allowed", status=413, code="too_large")


async def later(request: web.Request) -> None:
    """What aiohttp does when a caller asks whether its body is wanted: nothing, the guard answers."""


async def _let_come(request: web.Request) -> None:
    """Tells a caller that asks (``Expect: 100-continue``) to send its body. Raises ApiError (417)."""
    expected = request.headers.get("Expect")
    if expected is None or request.version < HttpVersion11:
        return
    if expected.lower() != "100-continue":
        raise ApiError("Expect: only 100-continue", status=417, code="expectation_failed")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # it is no part of the answer


def _near(request: web.Request) -> str:
    """The place that was meant, perhaps."""
    there = [resource.canonical for resource in request.app.router.resources()]
    near = difflib.get_close_matches(request.path[:80], there, 1)
    return f"; did you mean {near[0]}?" if near else "; /v1/models lists the models, and what each offers"
