"""The HTTP application: its routes."""

from __future__ import annotations

from aiohttp import web

from broker.gateway.chat import Chat
from broker.gateway.context import Context
from broker.gateway.guard import later, make_guard
from broker.gateway.health import Health
from broker.gateway.images import Images
from broker.gateway.requests import Requests
from broker.gateway.silence import Silence
from broker.gateway.speech import SpeechEndpoint
from broker.gateway.transcriptions import Transcriptions
from broker.gateway.videos import Videos


def make_app(context: Context, silence: Silence) -> web.Application:
    """Builds the application. Run it with ``handler_cancellation``: a client that leaves ends its handler."""
    app = web.Application(
        client_max_size=int(context.settings.max_body_mb * 2**20),
        middlewares=[silence.hear, make_guard(context)],
    )
    health, requests = Health(context), Requests(context)
    images, videos = Images(context), Videos(context, requests)
    routes = [
        web.post("/v1/chat/completions", Chat(context).handle),
        web.post("/v1/audio/speech", SpeechEndpoint(context).handle),
        web.post("/v1/audio/transcriptions", Transcriptions(context).handle),
        web.post("/v1/images/generations", images.generate),
        web.post("/v1/images/edits", images.edit),
        web.post("/v1/videos", videos.create),
        web.get("/v1/videos", videos.listing),
        web.get("/v1/videos/{id}", videos.retrieve),
        web.get("/v1/videos/{id}/content", videos.content),
        web.delete("/v1/videos/{id}", videos.delete),
        web.get("/v1/requests/{id}", requests.status),
        web.delete("/v1/requests/{id}", requests.cancel),
        # Without HEAD, which must change nothing: these take a call from its reader, and may forget it.
        web.get("/v1/requests/{id}/stream", requests.stream, allow_head=False),
        web.get("/v1/requests/{id}/result", requests.result, allow_head=False),
        web.get("/v1/models", health.models),
        web.get("/v1/models/{id}", health.model),
        web.get("/health", health.health),
        web.get("/ready", health.ready),
        web.get("/metrics", health.metrics),
        web.get("/status", health.status),
    ]
    for route in routes:
        route.kwargs["expect_handler"] = later
    app.add_routes(routes)
    app.on_response_prepare.append(_stamp)
    return app


async def _stamp(request: web.Request, response: web.StreamResponse) -> None:
    if "id" in request:  # what no handler has seen has none
        response.headers["x-request-id"] = request["id"]
