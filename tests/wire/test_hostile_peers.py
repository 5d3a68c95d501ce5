"""What strangers send to the broker's sockets costs them the message, and nobody else anything.

That a zero-copy send from a buffer that is used again changes what is under way can't happen here: frames are
encoded for one send and copied into it, and tensors lie in blocks that are not reused before their release.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq

from broker.address import endpoints
from broker.client import BrokerError, Client
from broker.protocol import VERSION, Connect, Inspect, Submit, Who, decode_to_worker, encode, new_peer

ANSWER_MS = 60_000
GARBAGE = [
    b"",
    b"\x00",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    random.Random(1).randbytes(9),
    random.Random(2).randbytes(10_000),
    msgspec.msgpack.encode([]),
    msgspec.msgpack.encode(7),
    msgspec.msgpack.encode({"a": 1}),
    msgspec.msgpack.encode([["NoSuchMessage", 1]]),
    msgspec.msgpack.encode([["Beat", 7]]),
    msgspec.msgpack.encode([["Connect", "one", "api"]]),
    msgspec.msgpack.encode([["Emit", 1, 0, 1]]),
    msgspec.msgpack.encode([["Emit", "x", 0, 1, [0, True, {}, [1]]]]),
    encode([Connect(VERSION, "api")])[:-2],
    b"\x91" * 5000,
    b"\xdd\xff\xff\xff\xff",
]


@contextmanager
def dealer(endpoint: str, identity: bytes, *, receives: int = 1000) -> Iterator[zmq.Socket[bytes]]:
    """A raw socket connected to the broker."""
    context = zmq.Context()
    peer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.IDENTITY, identity)
    peer.setsockopt(zmq.RCVHWM, receives)
    peer.connect(endpoint)
    yield peer
    peer.close(ANSWER_MS)
    context.term()


async def refused(address: str) -> dict[str, int]:
    """The broker's counts of refused messages: it lives, and answers an honest client."""
    async with Client(address) as client:
        counts: dict[str, int] = (await client.inspect("status"))["refused"]
        return counts


async def malformed(address: str, least: int) -> None:
    """Waits until the broker has counted so many messages as malformed."""
    async with asyncio.timeout(60):
        while (await refused(address)).get("malformed", 0) < least:
            pass


@pytest.mark.parametrize("side", ["workers", "clients"])
async def test_garbage_is_counted_and_dropped(broker: str, side: str) -> None:
    endpoint = getattr(endpoints(broker), side)
    for kind in "gwcx":
        with dealer(endpoint, new_peer(kind)) as peer:
            for data in GARBAGE:
                peer.send(data)
    await malformed(broker, 2 * len(GARBAGE))  # strangers' kinds, and most of the garbage of the others


async def test_what_is_nested_too_deep_is_counted_and_dropped(broker: str) -> None:
    deep = msgspec.Raw(b"\x91" * 100_000 + b"\x90")
    with dealer(endpoints(broker).clients, new_peer("c")) as peer:
        peer.send(encode([Submit(1, "line", ["out"], {}, {"a": deep})]))
    await malformed(broker, 1)


async def test_wrong_frame_counts_are_counted_and_dropped(broker: str) -> None:
    good = encode([Connect(VERSION, "api")])
    for endpoint in endpoints(broker):
        with dealer(endpoint, new_peer("c")) as peer:
            for frames in ([b"", good], [good, good], [b"", b"", good], [b"", b"", b"", b"", good]):
                peer.send_multipart(frames)
    await malformed(broker, 8)


async def test_a_pickle_runs_nothing(broker: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Touch:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {marker}",)

    for endpoint in endpoints(broker):
        for kind in "gwc":
            with dealer(endpoint, new_peer(kind)) as peer:
                peer.send(pickle.dumps(Touch()))
    await malformed(broker, 6)
    assert not marker.exists()


async def test_http_on_the_zeromq_ports_changes_nothing(broker: str) -> None:
    for endpoint in endpoints(broker):
        parts = urlsplit(endpoint)
        family = socket.AF_UNIX if parts.scheme == "ipc" else socket.AF_INET
        where = endpoint.removeprefix("ipc://") if parts.scheme == "ipc" else (parts.hostname, parts.port)
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4000, b"\x16\x03\x01" * 100):
            with socket.socket(family) as peer:
                peer.connect(where)
                peer.sendall(data)
    assert "internal_error" not in await refused(broker)


async def test_a_stranger_that_speaks_well_is_asked_who_it_is(broker: str) -> None:
    with dealer(endpoints(broker).workers, new_peer("w")) as peer:
        peer.send(msgspec.msgpack.encode([["Finish", 2, 0, 1], ["Finish", 1, 0, 1]]))
        assert peer.poll(ANSWER_MS)
        first, second = decode_to_worker(peer.recv())
        assert isinstance(first, Who)
        assert first == second == Who(boot=first.boot)


async def test_another_protocol_version_is_rejected_with_the_cure(broker: str) -> None:
    with dealer(endpoints(broker).clients, new_peer("c")) as peer:
        peer.send(encode([Connect(VERSION + 1, "api")]))
        assert peer.poll(ANSWER_MS)
        ((tag, reason),) = msgspec.msgpack.decode(peer.recv())
        assert tag == "Reject"
        assert "install the same release" in reason


async def test_hostile_handles_are_refused_at_the_door(broker: str) -> None:
    async with Client(broker) as client:
        prefix = client._lending.prefix
        places = ["", "/etc/passwd", "../x", "a/b", "x" * 300, "omni-\0", prefix[:-2] + "x"]
        for place in places:
            with dealer(endpoints(broker).clients, new_peer("c")) as peer:
                handle = ["shm", [place, -1, 2**40], 2**50, "float32", [2**30, 2**30]]
                chunk = [0, True, {}, [handle]]
                peer.send(encode([Connect(VERSION, "api")]))
                peer.send(msgspec.msgpack.encode([["Submit", 1, "line", ["out"], {"request": [chunk]}]]))
                answers: list[list[object]] = []
                while not any(a[0] == "Refused" for a in answers):
                    assert peer.poll(ANSWER_MS)
                    answers += msgspec.msgpack.decode(peer.recv())
        with pytest.raises(BrokerError):
            await client.submit("line", outputs=["nothing"], given={"request": [{}]})
    assert "internal_error" not in await refused(broker)


async def test_a_peer_that_never_reads_costs_the_others_nothing(broker: str) -> None:
    with dealer(endpoints(broker).clients, new_peer("c"), receives=1) as peer:
        peer.send(encode([Connect(VERSION, "api")]))
        for number in range(40_000):  # far more answers than ZeroMQ's pipes and the kernel's buffers hold
            peer.send(encode([Inspect(number, "status")]))
        async with asyncio.timeout(120):
            for _ in range(20):
                assert "internal_error" not in await refused(broker)
