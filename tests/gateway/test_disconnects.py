"""A client that leaves takes its work with it, within a second: queued, running or streaming, FIN or RST."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

import aiohttp
import pytest

from broker.client import Client
from tests.gateway.stack import Stack, empty, reaches
from tests.gateway.test_bad_requests import CHAT, SPEECH, USER, works

HANG = {"hang": True}

#: What the leaving client had asked for: path, body, and the tasks it has by then (running, queued).
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "sampling_params_list": [HANG, None, None]}),
    "chat of three choices": (
        "/v1/chat/completions",
        {**CHAT, "n": 3, "sampling_params_list": [HANG, None, None]},
    ),
    "stream before its first chunk": (
        "/v1/chat/completions",
        {**CHAT, "stream": True, "sampling_params_list": [HANG, None, None]},
    ),
    "stream in its middle": (
        "/v1/chat/completions",
        {
            **CHAT,
            "messages": [{"role": "user", "content": "a b c d e f"}],
            "stream": True,
            "modalities": ["text", "audio"],
            "sampling_params_list": [None, {"hang": True, "at": 3}, None],
        },
    ),
    "speech": ("/v1/audio/speech", {**SPEECH, "sampling_params_list": [None, HANG, None]}),
}


def connect(stack: Stack, path: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request on a socket of its own, and does not read the answer."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", stack.port))
    connection.sendall(head.encode() + data)
    return connection


def leave(connection: socket.socket, how: str) -> None:
    """Ends a connection in good order or with a reset."""
    if how == "RST":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("what", ASKED)
async def test_a_client_that_leaves_frees_everything(
    stack: Stack, broker: Client, what: str, how: str
) -> None:
    path, body = ASKED[what]
    connection = connect(stack, path, body)
    await reaches(broker, 60.0, requests=body.get("n", 1), running=body.get("n", 1))
    leave(connection, how)
    await empty(broker)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_the_queue_is_never_served(
    stack: Stack, broker: Client, stream: bool
) -> None:
    narrow = {"model": "narrow", "messages": [USER]}
    first = connect(stack, "/v1/chat/completions", {**narrow, "sampling_params_list": [HANG]})
    await reaches(broker, 60.0, running=1)
    second = connect(stack, "/v1/chat/completions", {**narrow, "stream": stream})
    await reaches(broker, 60.0, queued=1)
    leave(second, "FIN")
    await reaches(broker, 60.0, queued=0, requests=1)
    leave(first, "FIN")
    await empty(broker)


async def test_a_client_that_leaves_while_it_uploads(stack: Stack, broker: Client) -> None:
    connection = socket.create_connection(("127.0.0.1", stack.port))
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    leave(connection, "RST")
    await empty(broker)


async def test_two_hundred_vanishing_clients_leave_nothing(
    stack: Stack, broker: Client, http: aiohttp.ClientSession
) -> None:
    kinds = list(ASKED.values())
    for start in range(0, 200, 20):
        connections = []
        for number in range(start, start + 20):
            connections.append(connect(stack, *kinds[number % len(kinds)]))
            if number % 3 == 0:  # some leave at once, before anything is known of them
                leave(connections.pop(), "RST" if number % 2 else "FIN")
        await asyncio.sleep(0)
        for number, connection in enumerate(connections):
            leave(connection, "RST" if number % 2 else "FIN")
    await empty(broker)
    await works(http)
