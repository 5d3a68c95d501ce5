"""The HTTP application: routes, request ids, and error bodies for whatever goes wrong."""

from __future__ import annotations

import itertools
import logging
import secrets
import time

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from broker.gateway.chat import Chat
from broker.gateway.context import Context
from broker.gateway.errors import ApiError, from_exception
from broker.gateway.health import Health
from broker.gateway.speech import SpeechEndpoint
from broker.gateway.transcriptions import Transcriptions

log = logging.getLogger("gateway")


def make_app(context: Context) -> web.Application:
    """Builds the application. Run it with ``handler_cancellation``: a client that leaves ends its handler."""
    app = web.Application(
        client_max_size=int(context.settings.max_body_mb * 2**20), middlewares=[_guard(context)]
    )
    health = Health(context)
    app.add_routes(
        [
            web.post("/v1/chat/completions", Chat(context).handle),
            web.post("/v1/audio/speech", SpeechEndpoint(context).handle),
            web.post("/v1/audio/transcriptions", Transcriptions(context).handle),
            web.get("/v1/models", health.models),
            web.get("/v1/models/{id}", health.model),
            web.get("/health", health.health),
            web.get("/ready", health.ready),
            web.get("/metrics", health.metrics),
        ]
    )
    app.on_response_prepare.append(_stamp)
    return app


async def _stamp(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = request["id"]


def _guard(context: Context) -> Middleware:
    """The middleware that names each request, counts it, and gives every failure an error body.

    The id is always our own: a caller's `x-request-id` names nothing here, so two callers may send the same.
    """
    prefix = secrets.token_hex(5)
    numbers = itertools.count(1)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = request["id"] = f"{prefix}{next(numbers):08x}"
        started = time.perf_counter()
        status = "disconnected"
        try:
            response = await handler(request)
            status = str(response.status)
        except ConnectionError:
            # The client has gone, or was cut off. This goes nowhere, but aiohttp logs what is raised instead.
            response = web.Response(status=499)
        except Exception as error:
            failure = _failure(error)
            response = web.Response(
                body=failure.body(request_id),
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
                elapsed = time.perf_counter() - started
                log.debug("%s %s %s %s in %.3f s", request_id, request.method, path, status, elapsed)
        return response

    return guard


def _failure(error: Exception) -> ApiError:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError("the body is too large", status=413, code="too_large")
    if isinstance(error, web.HTTPException):
        return ApiError(error.reason, status=error.status, code=error.reason.lower().replace(" ", "_"))
    return from_exception(error)
