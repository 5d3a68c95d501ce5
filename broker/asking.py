"""Asks the broker for a report again and again, for those who watch it from beside.

A client without memory of its own and without NumPy, so that it may live in the supervisor.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from broker.address import endpoints
from broker.protocol import (
    VERSION,
    Beat,
    Bye,
    Connect,
    Inspect,
    Report,
    Resync,
    Unplaced,
    Who,
    decode_to_client,
    new_peer,
)
from broker.wire import Connection

_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


class Asker:
    """One connection, on the running loop. It introduces itself again to a broker that was restarted.

    Args:
        address: The broker's.
        kind: What `omni-broker status` calls this client.
        what: The report that is wanted, see :mod:`broker.core.report`.
    """

    def __init__(self, address: str, kind: str, what: str) -> None:
        self._kind = kind
        self._what = what
        self._unplaced: dict[str, str] = {}
        self._report: dict[str, Any] | None = None
        connection = Connection(endpoints(address).clients, new_peer("c"), decode_to_client, self._on_message)
        self._connection = connection
        connection.post(Connect(VERSION, kind))

    async def ask(self, pause_s: float) -> dict[str, Any] | None:
        """Asks, waits for so long, and gives the newest report that has come meanwhile, if one has."""
        self._report = None
        self._connection.post(Beat())
        self._connection.post(Inspect(0, self._what))
        await asyncio.sleep(pause_s)
        return self._report

    def tell(self, unplaced: dict[str, str]) -> None:
        """Says which stages can't have the workers they should, and why, if that is new."""
        if unplaced != self._unplaced:
            self._unplaced = dict(unplaced)
            self._connection.post(Unplaced(self._unplaced))

    def close(self) -> None:
        """Leaves the broker."""
        self._connection.post(Bye())
        self._connection.close()

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Report):
            self._report = _decode(message.body)
        elif isinstance(message, Who):  # the broker was restarted, or it had given us up
            for part in (
                Connect(VERSION, self._kind),
                Resync([], [], message.boot),
                Unplaced(self._unplaced),
            ):
                self._connection.post(part)
