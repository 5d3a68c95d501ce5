"""Stages on three hosts: the answers are those of one, and tensors go from host to host past the broker."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from adapters.chunk import Payload
from adapters.handle import BadHandle, BlockId, Handle, Unreachable
from adapters.net.fetch import Fetcher
from broker.address import endpoints
from broker.client import Client
from broker.keys import Keys, Shared, make
from broker.protocol import VERSION, Bye, Connect, Connected, Hosts, decode_to_client, encode, new_peer
from scripts.benchmarks.hosts import Cluster
from tests.hosts.rig import document, has, running, sit_on, sung, words
from tests.house import House
from workers.engines.function import checksum

SONG = 6  #: words, of 7.3 MiB each
NBYTES = SONG * sung(0, big=True).nbytes
TRANSPORTS = ("zmq", "ucx")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The broker's host, which has the first stage of `echo` too, and two more."""
    pipelines = [document(f"big-{name}", big=True, transport=name) for name in TRANSPORTS if has(name)]
    big = [pipeline["name"] for pipeline in pipelines]
    workers = {
        0: ["echo/say"],
        1: ["echo/tone", "echo/picture", *(f"{name}/tone" for name in big)],
        2: ["echo/sum", *(f"{name}/sum" for name in big)],
    }
    with running(tmp_path_factory.mktemp("three"), 3, ["echo", *pipelines], workers) as made:
        yield made


async def echoed(address: str) -> dict[str, list[Any]]:
    """Output -> what came of it, for one request with every output of `echo`."""
    got: dict[str, list[Any]] = {}
    given: dict[str, list[Payload]] = {"request": [{"text": "one two three four five"}]}
    outputs = ["text", "audio", "image", "checksum"]
    params = {"picture": {"width": 300, "height": 200}}
    async with (
        Client(address) as client,
        await client.submit("echo", outputs=outputs, given=given, params=params, seed=3) as stream,
    ):
        async for output, payload in stream:
            value = next(v for v in (payload.get(k) for k in ("text", "audio", "image")) if v is not None)
            got.setdefault(output, []).append(np.array(value) if isinstance(value, np.ndarray) else value)
            del payload, value
    return got


async def test_echo_on_three_hosts_answers_as_on_one(
    three: Cluster, echo: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await echoed(echo.address)
    sit_on(three.first, monkeypatch)
    got = await echoed(three.local)
    assert got.keys() == expected.keys() == {"text", "audio", "image", "checksum"}
    for output, values in expected.items():
        for one, other in zip(got[output], values, strict=True):
            assert np.array_equal(one, other), output


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_large_tensors_go_from_host_to_host_past_the_brokers(
    three: Cluster, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    if not has(transport):
        pytest.skip("ucxx is not installed")
    sit_on(three.first, monkeypatch)
    before = [host.traffic() for host in three.hosts]
    async with Client(three.local) as client:
        given = {"request": words(SONG)}
        async with await client.submit(f"big-{transport}", outputs=["text"], given=given) as stream:
            said = [payload["text"] async for _, payload in stream]
    broker, producer, consumer = (
        (now.received - was.received, now.sent - was.sent)
        for now, was in zip((host.traffic() for host in three.hosts), before, strict=True)
    )
    assert said == [f"{summed(SONG):08x}"]
    assert producer[1] > NBYTES
    assert consumer[0] > NBYTES
    assert sum(broker) < NBYTES / 50
    at = re.findall(rf"\[big-{transport}/sum \d+\] blocks from (.*) come by (.*)", three.hosts[2].log)
    assert (three.hosts[1].address, transport) in at
    assert {way for _, way in at} == {transport}


async def test_a_client_on_a_host_of_its_own_lends_and_reads_tensors(
    three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a folder of shared memory that no other process has, and reaches all by the network."""
    monkeypatch.setenv("OMNI_KEYS", str(three.keys))
    async with Client(three.address) as client:
        given: dict[str, list[Payload]] = {"tone": [{"audio": sung(n, big=True)} for n in range(2)]}
        async with await client.submit("big-zmq", outputs=["text"], given=given) as stream:
            said = [payload["text"] async for _, payload in stream]
        crc = 0
        for payload in given["tone"]:
            crc = checksum(payload, crc)
        assert said == [f"{crc:08x}"]
        given = {"request": [{"text": "one two"}]}
        async with await client.submit("echo", outputs=["audio"], given=given) as stream:
            heard = [np.array(payload["audio"]) async for _, payload in stream]
        assert [len(wave) for wave in heard] == [4800, 4800]


async def test_a_stranger_gets_no_word_from_a_guardians_data_server(three: Cluster, tmp_path: Path) -> None:
    make(tmp_path / "keys")
    run, book = told(three)
    host, addresses = next((host, addresses) for host, addresses in book.items() if addresses)
    assert all(three.lan.addresses[0].rpartition(".")[0] in address for address in addresses)
    block = BlockId(f"omni-{run}-{host}{secrets.token_hex(6)}-0", 0, 1)
    for folder, error in ((three.keys, BadHandle), (tmp_path / "keys", Unreachable), (None, Unreachable)):
        secure = Shared(Keys.load(folder)) if folder is not None else None
        fetcher = Fetcher(run, secure=secure, patience_s=60 if error is BadHandle else 0.5)
        fetcher.book = {host: addresses}
        with pytest.raises(error):
            await fetcher.fetch(Handle("shm", block, 8, "uint8", (8,)))
        fetcher.close()


def told(cluster: Cluster) -> tuple[str, dict[str, list[str]]]:
    """What a client hears as it comes: the run's nonce, and where memory can be read."""
    run, book = "", {}
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.IDENTITY, new_peer("c"))
        dealer.connect(endpoints(cluster.local).clients)
        dealer.send(encode([Connect(VERSION, "cli")]))
        while not (run and book):
            assert dealer.poll(60_000)
            for message in decode_to_client(dealer.recv()):
                run = message.run if isinstance(message, Connected) else run
                book = message.book if isinstance(message, Hosts) else book
        dealer.send(encode([Bye()]))
        dealer.close(linger=500)
    return run, book


BROKER = ("broker.cli", "start", "--pipeline", "echo", "--listen")
WORKER = ("workers.cli", "--stage", "sum", "--broker")


@pytest.mark.parametrize("command", [BROKER, WORKER], ids=["broker", "worker"])
def test_beyond_loopback_nothing_starts_without_keys(
    three: Cluster, tmp_path: Path, command: tuple[str, ...]
) -> None:
    host = three.hosts[1]
    env = {"OMNI_KEYS": "", "XDG_CONFIG_HOME": str(tmp_path)}
    found = host.run(*command, f"tcp://{host.address}:6000", env=env)
    assert found.returncode == 2
    assert "omni-broker keys" in found.stderr


def summed(number: int) -> int:
    """The checksum of so many words, each as `tone` gives it."""
    crc = 0
    for n in range(number):
        crc = checksum({"audio": sung(n, big=True), "sample_rate": 192_000}, crc)
    return crc
