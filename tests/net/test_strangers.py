"""What a data server gives to those who ask wrongly, ask too much, or have no keys: an answer, or nothing."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from adapters.handle import AdapterError, BlockId
from adapters.net.wire import LONGEST_QUESTION, PIECE, PIPE, Piece, Refused, Want, decode_answer, encode
from broker.keys import Keys, KeysError, Shared, make
from tests.net.rig import OTHER_RUN, RUN, FarHost

ANSWER_MS = 60_000
SILENCE_MS = 500  #: a handshake on loopback takes a few


@pytest.fixture
def dealer() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = ANSWER_MS
        yield socket


def connect(dealer: zmq.Socket[bytes], addresses: list[str]) -> None:
    dealer.connect(addresses[0].replace("zmq://", "tcp://"))


def test_wrong_questions_get_an_error_and_the_server_lives(far: FarHost, dealer: zmq.Socket[bytes]) -> None:
    handle, sent = far.put(PIECE + 10)
    block = handle.block

    def changed(**fields: Any) -> Want:
        return Want(1, RUN, msgspec.structs.replace(handle, **fields), 0, 10)

    def elsewhere(place: str, offset: int = 64, transport: str = "shm") -> Want:
        return changed(transport=transport, block=BlockId(place, offset, 1))

    foreign = f"omni-{OTHER_RUN}-{'0' * 24}-0"
    (far.shm / foreign).write_bytes(bytes(2 * PIECE))
    (far.shm / foreign).chmod(0o600)
    (far.shm / "secret").write_bytes(bytes(2 * PIECE))
    wrong = {
        "another run": Want(1, OTHER_RUN, handle, 0, 10),
        "an arena of another run": elsewhere(foreign),
        "a path": elsewhere("../far-shm/secret"),
        "a path behind a name": elsewhere(f"omni-{RUN}-../../secret"),
        "an absolute path": elsewhere(str(far.shm / "secret")),
        "no name": elsewhere(""),
        "a name with a zero": elsewhere(f"{block.place}\0"),
        "a stored path": elsewhere("../../etc/passwd", 0, "disk"),
        "a copy with a path": changed(transport="disk", copy="request-1/../../../secret"),
        "an absent file": elsewhere("request-1/" + "0" * 32, 0, "disk"),
        "a transport": changed(transport="pickle"),
        "landed": changed(transport="landed"),
        "another generation": changed(block=BlockId(block.place, block.offset, 2)),
        "another place in the segment": changed(block=BlockId(block.place, block.offset + 64, 1)),
        "before the segment": changed(block=BlockId(block.place, -64, 1)),
        "behind the segment": changed(block=BlockId(block.place, 1 << 62, 1)),
        "another length": changed(nbytes=10, shape=(10,)),
        "a huge length": changed(nbytes=1 << 62, shape=(1 << 62,)),
        "a shape that does not fit": changed(shape=(3,)),
        "a shape below zero": changed(shape=(-1,)),
        "many dimensions": changed(shape=(1,) * 1000),
        "a dtype": changed(dtype="object"),
        "a piece below the block": Want(1, RUN, handle, -1, 10),
        "a piece above the block": Want(1, RUN, handle, PIECE, 11),
        "a piece of negative length": Want(1, RUN, handle, 10, -1),
        "a piece that is too large": Want(1, RUN, handle, 0, PIECE + 1),
        "a piece of huge length": Want(1, RUN, handle, 0, 1 << 62),
    }
    connect(dealer, far.serve())
    for name, want in wrong.items():
        dealer.send(encode(want))
        (answer,) = dealer.recv_multipart()
        assert isinstance(decode_answer(answer), Refused), name
    for name, frames in {
        "nonsense": [b"GET / HTTP/1.1"],
        "nothing": [b""],
        "many frames": [b"x"] * 5,
        "a pickle": [b"\x80\x04."],
        "another message": [msgspec.msgpack.encode(["want", "one", RUN, None, 0, 0])],
        "a number beyond 64 bits": [msgspec.msgpack.encode(["want", 1, RUN])[:-1] + b"\xcf" + b"\xff" * 8],
    }.items():
        dealer.send_multipart(frames)
        (answer,) = dealer.recv_multipart()
        assert isinstance(decode_answer(answer), Refused), name
    dealer.send(encode(Want(9, RUN, handle, PIECE, 10)))
    header, data = dealer.recv_multipart()
    assert decode_answer(header) == Piece(9)
    assert data == sent[PIECE:]
    for path in (far.shm / foreign, far.shm / "secret"):
        path.unlink()


def test_a_question_that_is_nested_without_end_does_not_end_the_server(
    far: FarHost, dealer: zmq.Socket[bytes]
) -> None:
    """What goes beyond a message's fields is skipped, level by level, which ends in a RecursionError."""
    handle, sent = far.put(100)
    good = encode(Want(1, RUN, handle, 0, 100))
    connect(dealer, far.serve())
    dealer.send(bytes([good[0] + 1]) + good[1:] + b"\x91" * (LONGEST_QUESTION - 1000))
    (answer,) = dealer.recv_multipart()
    assert isinstance(decode_answer(answer), Refused)
    dealer.send(good)
    assert dealer.recv_multipart()[1] == sent


def test_who_sends_much_is_cut_off_and_others_are_served(far: FarHost, dealer: zmq.Socket[bytes]) -> None:
    handle, sent = far.put(100)
    addresses = far.serve()
    connect(dealer, addresses)
    dealer.send(bytes(LONGEST_QUESTION + 1))
    with dealer.context.socket(zmq.DEALER) as other:
        other.linger = 0
        other.rcvtimeo = ANSWER_MS
        connect(other, addresses)
        other.send(encode(Want(1, RUN, handle, 0, 100)))
        assert other.recv_multipart()[1] == sent
    assert not dealer.poll(SILENCE_MS)


async def test_a_peer_that_reads_nothing_costs_the_server_no_memory(
    far: FarHost, dealer: zmq.Socket[bytes]
) -> None:
    handle, sent = far.put(16 * PIECE)
    server = far.start()
    fetcher = far.fetcher(*server.addresses)
    assert bytes(await fetcher.fetch(handle)) == sent
    before = server.memory()
    dealer.rcvhwm = 1
    dealer.sndtimeo = ANSWER_MS
    connect(dealer, server.addresses)
    question = encode(Want(1, RUN, handle, 0, PIECE))
    for _ in range(20 * PIPE):
        dealer.send(question)
    for _ in range(3):
        assert bytes(await fetcher.fetch(handle)) == sent
    assert server.memory() - before < 8 * PIECE


def test_without_descriptors_left_the_server_lives(far: FarHost, dealer: zmq.Socket[bytes]) -> None:
    """A question whose segment can't be opened is refused, and the next is answered."""
    handle, sent = far.put(100)
    connect(dealer, far.serve())
    dealer.send(b"hello")
    dealer.recv_multipart()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with open(os.devnull) as lowest:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno(), hard))
        dealer.send(encode(Want(1, RUN, handle, 0, 100)))
        (answer,) = dealer.recv_multipart()
        assert isinstance(decode_answer(answer), Refused)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    dealer.send(encode(Want(2, RUN, handle, 0, 100)))
    assert dealer.recv_multipart()[1] == sent


# --- keys


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    make(tmp_path / "keys")
    return Keys.load(tmp_path / "keys")


def answered(far: FarHost, addresses: list[str], prepare: Callable[[zmq.Socket[bytes]], None]) -> bool:
    """Whether a peer that was prepared so gets a block."""
    handle, sent = far.put(100)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        prepare(socket)
        connect(socket, addresses)
        socket.send(encode(Want(1, RUN, handle, 0, 100)))
        if not socket.poll(SILENCE_MS):
            return False
        return socket.recv_multipart()[1] == sent


async def test_only_the_workers_key_is_let_in(far: FarHost, keys: Keys, tmp_path: Path) -> None:
    make(tmp_path / "other")
    other = Shared(Keys.load(tmp_path / "other"))
    addresses = far.start(keys=keys.folder).addresses

    def stranger(socket: zmq.Socket[bytes]) -> None:
        """Knows the public key, but has a pair of its own."""
        other.client(socket)
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.client)

    def thief(socket: zmq.Socket[bytes]) -> None:
        """Shows the public key without its secret."""
        Shared(keys).client(socket)
        socket.setsockopt(zmq.CURVE_SECRETKEY, zmq.curve_keypair()[1])

    def broker(socket: zmq.Socket[bytes]) -> None:
        """Has the broker's pair: that one opens nothing here."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.client)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.server)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.need_server())

    for prepare in (lambda socket: None, other.client, stranger, thief, broker):
        assert not answered(far, addresses, prepare)
    handle, sent = far.put(3 * PIECE)
    assert bytes(await far.fetcher(*addresses, secure=Shared(keys)).fetch(handle)) == sent


async def test_a_fetcher_believes_only_servers_with_the_key(far: FarHost, keys: Keys, tmp_path: Path) -> None:
    make(tmp_path / "other")
    handle, _ = far.put(100)
    addresses = far.serve() + far.serve(secure=Shared(Keys.load(tmp_path / "other")))
    with pytest.raises(AdapterError, match="out of reach"):
        await far.fetcher(*addresses, patience_s=0.5, silence_s=0.2, secure=Shared(keys)).fetch(handle)


def test_without_the_workers_secret_nothing_is_served_or_fetched(keys: Keys) -> None:
    (keys.folder / "client.key_secret").unlink()
    with pytest.raises(KeysError, match=r"client\.key_secret"):
        Shared(Keys.load(keys.folder))


def test_an_address_that_is_not_ours_is_named_with_the_cure(far: FarHost) -> None:
    from adapters.net.server import DataServer
    from adapters.reader import Reader

    with pytest.raises(AdapterError, match="--data-host"):
        DataServer(RUN, "203.0.113.7", Reader(far.shm), secure=None)
