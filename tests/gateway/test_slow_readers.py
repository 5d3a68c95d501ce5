"""Clients that do not read: they hold nobody up, cost bounded memory, and are given up after a while.

What they don't read is not made either: it waits for room in each queue on the way, back to the first stage.
"""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

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


LONG: dict[str, Any] = {
    **CHAT,
    "messages": [{"role": "user", "content": "w " * (WORDS // 2)}],
    "modalities": ["audio"],
    "audio": {"voice": "alloy", "format": "pcm16"},
    "sampling_params_list": [None, {"speed": 0.25}, None],
}


def is_served(connection: socket.socket) -> bool:
    """Whether the gateway still holds its end of a connection: it may say nothing of having closed it."""
    own, its = connection.getsockname()[1], connection.getpeername()[1]
    ends = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(a.endswith(f":{its:04X}") and b.endswith(f":{own:04X}") and s == "01" for a, b, s in ends)


async def test_a_whole_answer_that_nobody_reads_is_given_up(
    stack: Stack, broker: Client, http: aiohttp.ClientSession
) -> None:
    with connect(stack, "/v1/chat/completions", LONG) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert is_served(connection)
        async with asyncio.timeout(60):
            while is_served(connection):
                await asyncio.sleep(0.1)
    await works(http)


async def test_a_client_that_reads_slowly_is_not_given_up(stack: Stack, http: aiohttp.ClientSession) -> None:
    with connect(stack, "/v1/chat/completions", {**LONG, "stream": True}) as connection:
        got = await asyncio.to_thread(read_slowly, connection, 12.0)
    assert b"data: [DONE]" in got[-100:]


def read_slowly(connection: socket.socket, slow_s: float) -> bytes:
    """All that comes: for a while some of it now and then, the kernel's buffers being full, then fast."""
    got = bytearray()
    until = time.monotonic() + slow_s
    connection.settimeout(60)
    while b"[DONE]" not in got[-100:] and (piece := connection.recv(32_768)):
        got += piece
        if time.monotonic() < until:
            time.sleep(0.2)
    return bytes(got)
