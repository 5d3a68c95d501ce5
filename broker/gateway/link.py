"""The gateway's connection to the broker: made in the background, so HTTP answers from the first moment."""

from __future__ import annotations

import asyncio
import logging
import time

from broker.client import BrokerError, Client
from broker.gateway.errors import ApiError
from broker.gateway.models import Model

log = logging.getLogger("gateway")

CONNECT_S = 60.0  #: one try; ZeroMQ itself looks for the broker several times a second meanwhile


class BrokerLink:
    """Holds the client and what its pipelines mean for HTTP.

    Args:
        address: Of the broker, see :func:`broker.address.endpoints`.
    """

    def __init__(self, address: str | None) -> None:
        self._client = Client(address, kind="gateway")
        self._connecting: asyncio.Task[None] | None = None
        self._models: dict[str, Model] = {}
        self._known: object = None

    def start(self) -> None:
        """Begins to look for the broker."""
        self._connecting = asyncio.create_task(self._connect())

    async def close(self) -> None:
        """Leaves the broker; open requests are aborted."""
        if self._connecting is not None:
            self._connecting.cancel()
        await self._client.close()

    async def _connect(self) -> None:
        while True:
            try:
                await self._client.connect(CONNECT_S)
            except BrokerError as error:
                log.warning("%s", error)
                await asyncio.sleep(1.0)  # a refusal comes at once
            else:
                log.info("connected to the broker; models: %s", ", ".join(self._client.pipelines))
                return

    @property
    def up(self) -> bool:
        """Whether the broker has been heard lately."""
        return self._connecting is not None and self._connecting.done() and self._client.alive

    @property
    def client(self) -> Client:
        """The connection. Raises ApiError (503) while there is no broker."""
        if not self.up:
            raise ApiError("the broker does not answer", status=503, code="broker_gone", retry_after_s=1.0)
        return self._client

    @property
    def models(self) -> dict[str, Model]:
        """What the broker serves, by name. Raises ApiError (503) while there is no broker."""
        pipelines = self.client.pipelines
        if pipelines is not self._known:  # the broker is new, or was restarted
            created = int(time.time())
            self._models = {name: Model(pipeline, created) for name, pipeline in pipelines.items()}
            self._known = pipelines
        return self._models

    def model(self, name: str | None) -> Model:
        """The model a request names; without a name the only one.

        Raises ApiError: 404 for an unknown name, 400 where a name is needed, 503 while there is no broker.
        """
        models = self.models
        if name is None:
            if len(models) == 1:
                return next(iter(models.values()))
            raise ApiError(
                f"model is required; there are {', '.join(models)}", "model", code="model_required"
            )
        model = models.get(name)
        if model is None:
            raise ApiError(
                f"no model {name[:80]!r}; there are {', '.join(models)}",
                "model",
                status=404,
                code="model_not_found",
            )
        return model
