"""CURVE: the right key comes in, and nobody else; keys that others could read are not used."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from broker.address import AddressError, endpoints, keys_dir
from broker.keys import Door, Keys, KeysError, make, secure_client
from broker.protocol import decode_to_client, new_peer
from broker.wire import Connection

SILENCE_MS = 500  #: a handshake on loopback takes a few
ANSWER_MS = 60_000


@pytest.fixture(autouse=True)
def no_keys_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever keys the developer has are not seen."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("OMNI_KEYS", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Fresh keys."""
    make(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def listener(folder: Path) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A ROUTER behind a door, and its endpoint."""
    door = Door(Keys.load(folder))
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        door.secure(router)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        yield router, f"tcp://127.0.0.1:{port}"
    door.close()


def heard(
    listener: tuple[zmq.Socket[bytes], str], prepare: Callable[[zmq.Socket[bytes]], None], wait_ms: int
) -> bool:
    """Whether a message of a peer arrives."""
    router, endpoint = listener
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        prepare(dealer)
        dealer.setsockopt(zmq.SNDTIMEO, wait_ms)
        dealer.connect(endpoint)
        try:
            dealer.send(b"let me in")
        except zmq.Again:  # it was shown the door before
            return False
        if not router.poll(wait_ms):
            return False
        assert router.recv_multipart()[1] == b"let me in"
        return True


def test_only_the_right_key_is_let_in(
    listener: tuple[zmq.Socket[bytes], str], folder: Path, tmp_path: Path
) -> None:
    ours = Keys.load(folder)
    make(tmp_path / "other")
    other = Keys.load(tmp_path / "other")

    def stranger(dealer: zmq.Socket[bytes]) -> None:
        """Knows the broker's public key, but has a key of its own."""
        secure_client(dealer, other)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, ours.server)

    def thief(dealer: zmq.Socket[bytes]) -> None:
        """Shows our public key without its secret."""
        secure_client(dealer, ours)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, other.client_secret or b"")

    def plain(dealer: zmq.Socket[bytes]) -> None:
        dealer.setsockopt(zmq.PLAIN_USERNAME, b"admin")
        dealer.setsockopt(zmq.PLAIN_PASSWORD, b"admin")

    assert heard(listener, lambda dealer: secure_client(dealer, ours), ANSWER_MS)
    assert not heard(listener, lambda dealer: None, SILENCE_MS), "no key"
    assert not heard(listener, plain, SILENCE_MS), "a password"
    assert not heard(listener, lambda dealer: secure_client(dealer, other), SILENCE_MS), (
        "another broker's key"
    )
    assert not heard(listener, stranger, SILENCE_MS), "an unknown key"
    assert not heard(listener, thief, SILENCE_MS), "a public key alone"
    assert heard(listener, lambda dealer: secure_client(dealer, ours), ANSWER_MS)


def test_a_listener_whose_door_is_closed_lets_nobody_in(folder: Path) -> None:
    """Without somebody to ask, ZeroMQ's own default is to let in every key."""
    keys = Keys.load(folder)
    door = Door(keys)
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        door.secure(router)
        door.close()
        port = router.bind_to_random_port("tcp://127.0.0.1")
        listener = (router, f"tcp://127.0.0.1:{port}")
        assert not heard(listener, lambda dealer: secure_client(dealer, keys), SILENCE_MS)


async def test_connections_over_tcp_use_the_keys(
    listener: tuple[zmq.Socket[bytes], str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, endpoint = listener
    monkeypatch.setenv("OMNI_KEYS", str(folder))
    peer = new_peer("c")
    connection = Connection(endpoint, peer, decode_to_client, lambda message: None)
    try:
        connection._socket.send(b"hello")
        assert router.poll(ANSWER_MS)
        assert router.recv_multipart() == [peer, b"hello"]
    finally:
        connection.close(0)


def test_keys_are_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make(tmp_path / "a" / "keys")
    finally:
        os.umask(before)
    folder = tmp_path / "a" / "keys"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    names = ("server.key", "server.key_secret", "client.key", "client.key_secret")
    assert files == dict.fromkeys(names, 0o600)


def test_keys_are_never_overwritten(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(KeysError, match="never overwritten"):
        make(folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_copy_for_a_worker_holds_no_secret_of_the_broker(folder: Path) -> None:
    (folder / "server.key_secret").unlink()
    (folder / "client.key").unlink()
    keys = Keys.load(folder)
    assert keys.client_secret is not None
    with pytest.raises(KeysError, match=r"no server\.key_secret"):
        Door(keys)


def test_a_broker_needs_no_secret_of_the_workers(folder: Path) -> None:
    (folder / "client.key_secret").unlink()
    (folder / "server.key").unlink()
    keys = Keys.load(folder)
    Door(keys).close()
    with zmq.Context.instance().socket(zmq.DEALER) as dealer, pytest.raises(KeysError, match="copy it"):
        secure_client(dealer, keys)


@pytest.mark.parametrize("name", ["", "client.key_secret", "server.key_secret"])
@pytest.mark.parametrize("mode", [0o040, 0o004, 0o020])
def test_keys_that_others_can_read_or_change_are_refused(folder: Path, name: str, mode: int) -> None:
    path = folder / name
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(KeysError, match="chmod go="):
        Keys.load(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "client.key_secret"])
def test_keys_of_another_user_are_refused(folder: Path, name: str) -> None:
    os.chown(folder / name, 65534, 65534)
    with pytest.raises(KeysError, match="another user"):
        Keys.load(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        'public-key = "short"',
        f'public-key = "{"~" * 40}"',
        f'public-key = "{"%" * 40}"',
        f'public-key = "{"#" * 40}"',
        f'public-key = "{"a" * 40}"\nsecret-key = "b"',
    ],
)
def test_a_file_that_is_no_certificate_is_refused(folder: Path, text: str) -> None:
    (folder / "client.key_secret").write_text(text)
    with pytest.raises(KeysError, match="no CURVE certificate"):
        Keys.load(folder)


def test_missing_keys_name_the_cure(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="omni-broker keys"):
        Keys.load(tmp_path / "nothing")
    (folder / "client.key").unlink()
    (folder / "client.key_secret").unlink()
    with pytest.raises(KeysError, match=r"no client\.key"):
        Keys.load(folder)


async def test_keys_that_are_named_but_missing_stop_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt folder must not mean a connection without keys."""
    monkeypatch.setenv("OMNI_KEYS", str(tmp_path / "nothing"))
    with pytest.raises(KeysError, match="nothing"):
        Connection("tcp://127.0.0.1:1", new_peer("c"), decode_to_client, lambda message: None)


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5555", "tcp://[::]:5555", "tcp://192.0.2.1:1", "tcp://host:1"]
)
def test_addresses_beyond_loopback_need_keys(
    address: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AddressError, match="omni-broker keys"):
        endpoints(address)
    monkeypatch.setenv("OMNI_KEYS", str(folder))
    port = int(address.rpartition(":")[2])
    assert endpoints(address).clients == f"{address.removesuffix(str(port))}{port + 1}"


def test_keys_lie_in_the_config_folder_if_no_other_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys_dir() is None
    default = Path(os.environ["XDG_CONFIG_HOME"]) / "omni-broker" / "keys"
    make(default)
    assert keys_dir() == default
    monkeypatch.setenv("OMNI_KEYS", "/elsewhere")
    assert keys_dir() == Path("/elsewhere")
