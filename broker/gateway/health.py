"""GET /health, /ready, /status, /metrics and /v1/models."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from broker.client import BrokerError
from broker.gateway import metrics
from broker.gateway.context import Context
from broker.gateway.errors import ApiError
from broker.gateway.link import BrokerLink
from broker.gateway.models import listing


class Probe:
    """Asks the broker for a report: at most one question at a time, shared by all who wait for it."""

    def __init__(self, link: BrokerLink, what: str, timeout_s: float) -> None:
        self._link = link
        self._what = what
        self._timeout_s = timeout_s
        self._running: asyncio.Task[dict[str, Any] | None] | None = None

    async def ask(self) -> dict[str, Any] | None:
        """The report, or None without an answer in time."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._inspect())
        return await asyncio.shield(self._running)

    async def _inspect(self) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._link.client.inspect(self._what)
        except (TimeoutError, ApiError, BrokerError):
            return None


class Health:
    """The handlers that say how things are."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ready = Probe(context.link, "ready", context.settings.probe_s)
        self._metrics = Probe(context.link, "metrics", context.settings.probe_s)
        self._status = Probe(context.link, "status", context.settings.probe_s)

    async def health(self, request: web.Request) -> web.Response:
        """Liveness: this process answers."""
        return web.json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """Readiness: 503 while the broker or a stage that should have a worker has none."""
        report = await self._ready.ask()
        if report is None:
            return _not_ready("the broker does not answer", [])
        missing = [name for name in report["missing"] if self._wanted(name)]
        if missing:
            return _not_ready("stages without a worker", missing)
        return web.json_response({"status": "ready"})

    def _wanted(self, name: str) -> bool:
        """Whether a stage ("pipeline/stage") is one that workers are kept for."""
        pipeline, _, stage = name.partition("/")
        model = self._context.link.models.get(pipeline)
        return model is None or model.pipeline.stages[stage].resources.least > 0

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus' text; without a broker the gateway's own figures alone."""
        report = await self._metrics.ask()
        body = self._context.metrics.text(report or {})
        return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def status(self, request: web.Request) -> web.Response:
        """What `omni-broker status --json` prints: stages, queues, workers, how many are wanted and why."""
        report = await self._status.ask()
        if report is None:
            return _not_ready("the broker does not answer", [])
        return web.json_response(report)

    async def models(self, request: web.Request) -> web.Response:
        """All models."""
        return web.Response(body=listing(self._context.link.models), content_type="application/json")

    async def model(self, request: web.Request) -> web.Response:
        """One model."""
        card = self._context.link.model(request.match_info["id"]).card()
        return web.Response(body=msgspec.json.encode(card), content_type="application/json")


def _not_ready(reason: str, missing: list[str]) -> web.Response:
    body = {"status": "not ready", "reason": reason, "missing": missing}
    return web.json_response(body, status=503, headers={"Retry-After": "1"})
