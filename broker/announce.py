"""Says which stages are still loading, and once that everything is ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from broker.address import endpoints
from broker.protocol import VERSION, Beat, Bye, Connect, Inspect, Report, Who, decode_to_client, new_peer
from broker.wire import Connection

ASK_EVERY_S = 0.5
TELL_EVERY_S = 15.0

_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


async def announce(address: str, stages: set[str], where: str, say: Callable[[str], None]) -> None:
    """Asks the broker until all stages have a worker, and says so; on the way, what is missing.

    A client without memory of its own and without NumPy, so that it may live in the supervisor.

    Args:
        address: The broker's.
        stages: Those that workers are kept for, as "pipeline/stage"; others are not waited for.
        where: What is told at the end, the place to go to.
        say: Gets each line.
    """
    missing: asyncio.Queue[set[str]] = asyncio.Queue()

    def on_message(message: Any) -> None:
        if isinstance(message, Report):
            missing.put_nowait(set(_decode(message.body)["missing"]) & stages)
        elif isinstance(message, Who):  # the broker was restarted
            connection.post(Connect(VERSION, "supervisor"))

    connection = Connection(endpoints(address).clients, new_peer("c"), decode_to_client, on_message)
    connection.post(Connect(VERSION, "supervisor"))
    began = told = time.monotonic()
    try:
        while True:
            connection.post(Beat())
            connection.post(Inspect(0, "ready"))
            await asyncio.sleep(ASK_EVERY_S)
            while not missing.empty():
                waits_for = missing.get_nowait()
                if not waits_for:
                    say(f"ready after {time.monotonic() - began:.0f} s{where}")
                    return
                if time.monotonic() - told > TELL_EVERY_S:
                    told = time.monotonic()
                    say(f"loading {', '.join(sorted(waits_for))} ({told - began:.0f} s)")
    finally:
        connection.post(Bye())
        connection.close()
