"""The broker's client: what the gateway, the command line and the Python API talk through.

    async with Client(address, kind="api") as client:
        stream = await client.submit("voice", outputs=["text"], given={"request": [payload]}, ...)
        async for event in stream: ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

from adapters.chunk import Payload
from broker.protocol import Error, Timing
from pipelines.graph import Pipeline


class BrokerError(Exception):
    """A request that was refused or that failed; carries the wire's :class:`Error`."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.message)
        self.error = error


class BrokerGone(BrokerError):
    """No broker answers at the address, or it went away."""


class RequestStream:
    """The events of one request, in order. Leaving the ``async with`` early aborts the request.

    Iterating yields ``(output, payload)`` pairs; tensors are read-only views that free themselves. At the
    end :attr:`timings` is set; a failed request raises :class:`BrokerError` from the iteration.
    """

    request: int  #: the broker's number for it
    timings: list[Timing]

    def __aiter__(self) -> AsyncIterator[tuple[str, Payload]]: ...

    async def __anext__(self) -> tuple[str, Payload]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def abort(self) -> None:
        """Tells the broker that nobody waits any more. Idempotent; no await, so it works in any clean-up."""


class Client:
    """One connection to the broker."""

    pipelines: dict[str, Pipeline]  #: what the broker serves, known after ``connect``

    def __init__(self, address: str | None = None, *, kind: str = "api") -> None: ...

    async def connect(self, timeout_s: float = 5.0) -> None:
        """Raises :class:`BrokerGone` with the address and the cure when nothing answers."""

    async def submit(
        self,
        pipeline: str,
        *,
        outputs: list[str],
        given: dict[str, list[Payload]],
        params: dict[str, dict[str, Any]] | None = None,
        has: list[str] | None = None,
        seed: int | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        tenant: str = "",
    ) -> RequestStream:
        """Submits and waits until the broker has accepted. Raises :class:`BrokerError` when it refuses."""
        raise NotImplementedError

    async def inspect(self, what: str) -> dict[str, Any]:
        """"status", "ready" or "metrics"."""
        raise NotImplementedError

    async def close(self) -> None: ...
