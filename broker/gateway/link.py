"""The gateway's connection to the broker: made in the background, so HTTP answers from the first moment."""

from __future__ import annotations

import asyncio
import logging
import time

from broker.client import BrokerError, Client
from broker.gateway.errors import ApiError
from broker.gateway.models import Model

log = logging.getLogger("gateway")

PATIENCE_S = 3.0  #: how long a call waits for a broker; a restart takes less than one second
LOOK_S = 0.02
CONNECT_S = 60.0  #: one try; ZeroMQ itself looks for the broker several times a second meanwhile


class BrokerLink:
    """Holds the client and what its pipelines mean for HTTP.

    Args:
        address: Of the broker, see :func:`broker.address.endpoints`.
        data_host: Where other hosts read what is uploaded here, see :func:`broker.serving.data_address`.
    """

    def __init__(self, address: str | None, data_host: str | None = None) -> None:
        self._client = Client(address, kind="gateway", data_host=data_host)
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
            raise gone()
        return self._client

    async def reach(self) -> Client:
        """The connection; waits for a broker that is being restarted. Raises ApiError (503) after a while."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.up:
            if time.monotonic() > deadline:
                raise gone()
            await asyncio.sleep(LOOK_S)
        return self._client

    def refuse_if_all_busy(self) -> None:
        """Raises ApiError (429) when no pipeline takes anything now."""
        client = self._client
        if self.up and client.pipelines and client.pipelines.keys() <= client.busy.keys():
            raise _busy("every pipeline", min(client.busy.values()))

    async def accepting(self, name: str | None) -> Model:
        """Like :meth:`model`; waits for a broker that is being restarted, and raises 429 for a busy model."""
        client = await self.reach()
        model = self.model(name)
        if model.name in client.busy:
            raise _busy(model.name, client.busy[model.name])
        return model

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


def gone() -> ApiError:
    """What a caller is told while no broker answers."""
    return ApiError("the broker does not answer", status=503, code="broker_gone", retry_after_s=1.0)


def _busy(what: str, retry_after_s: float) -> ApiError:
    return ApiError(
        f"{what} has as much to do as it may",
        "model",
        status=429,
        code="overloaded",
        retry_after_s=retry_after_s,
    )
