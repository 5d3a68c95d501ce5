"""Clients that do not read: they hold nobody up, cost bounded memory, and are given up after a while.

What they don't read is not made either: it waits for room in each queue on the way, back to the first stage.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import aiohttp

from broker.client import Client
from tests.gateway.stack import Stack, attempts, empty
from tests.gateway.test_bad_requests import CHAT, works
from tests.gateway.test_disconnects import connect

READERS = 20
WORDS = 400
SOUND = WORDS * 0.8 * 24_000 * 2  #: bytes of speech that each of them has asked for


def anonymous(pid: int) -> int:
    """Resident bytes of a process that are its own; the arenas it looks at are shared, and bounded."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


async def chunks(broker: Client, stage: str) -> int:
    """How many chunks a stage has made so far."""
    count: int = (await broker.inspect("status"))["pipelines"]["echo"]["stages"][stage]["chunks"]
    return count


async def asked(broker: Client) -> int:
    """How many requests have come as far as a worker."""
    return attempts(await broker.inspect("status"), "echo", "say")


async def test_clients_that_never_read(stack: Stack, broker: Client, http: aiohttp.ClientSession) -> None:
    gateway = stack.processes["gateway"].pid
    before = anonymous(gateway)
    said, spoken = await chunks(broker, "say"), await chunks(broker, "tone")
    earlier = await asked(broker)
    body = {
        **CHAT,
        "messages": [{"role": "user", "content": "w " * WORDS}],
        "stream": True,
        "modalities": ["audio"],
        "audio": {"voice": "alloy", "format": "pcm16"},
        "sampling_params_list": [None, {"speed": 0.25}, None],
    }
    readers = []
    for _ in range(READERS):
        connection = connect(stack, "/v1/chat/completions", body)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        readers.append(connection)
    async with asyncio.timeout(60):  # as they are given up after 2 s, there may be fewer at a time
        while await asked(broker) < earlier + READERS:
            await asyncio.sleep(0.01)
    await works(http)
    await empty(broker, 30.0)  # the stall limit is 2 s here
    grown = anonymous(gateway) - before
    assert grown < READERS * SOUND / 8, f"{grown / 2**20:.0f} MiB for what nobody reads"
    assert await chunks(broker, "tone") - spoken < READERS * WORDS * 0.75, "the speech was made all the same"
    assert await chunks(broker, "say") - said < READERS * WORDS, "the text was made all the same"
    for connection in readers:
        connection.close()
    await works(http)
