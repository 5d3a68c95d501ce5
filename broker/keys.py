"""CURVE keys: who may speak to the broker over TCP, and encryption for what is said.

A folder holds up to four files as :func:`zmq.auth.create_certificates` writes them::

    server.key  server.key_secret    the broker's pair
    client.key  client.key_secret    the pair of all workers and clients

The broker needs ``server.key_secret`` and ``client.key``, everybody else ``server.key`` and
``client.key_secret``; a secret file holds its public key too. Each side knows the other's public key, so
neither talks to a stranger. Every TCP socket uses the keys where there are any
(:func:`broker.address.keys_dir`); ipc sockets never do, since their folder is closed.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from broker.address import AddressError, keys_dir

SERVER, CLIENT = "server", "client"
MAKE = "`omni-broker keys` makes a new set"

_DOMAIN = "omni"  #: ZAP's name for our TCP sockets; without one, libzmq asks nobody


class KeysError(AddressError):
    """Keys that can't be used; the message names the file and the cure."""


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """What a folder holds, as z85 text; a secret is None where only the public part is there."""

    folder: Path
    server: bytes
    client: bytes
    server_secret: bytes | None
    client_secret: bytes | None

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads a folder. Raises KeysError when it, or a file, is missing, broken, or open to others."""
        _check_closed(folder, "folder")
        server, server_secret = _read(folder, SERVER)
        client, client_secret = _read(folder, CLIENT)
        return cls(folder, server, client, server_secret, client_secret)

    @classmethod
    def find(cls) -> Self | None:
        """The keys that this process uses, or None where none were made. Raises KeysError as `load` does."""
        folder = keys_dir()
        return None if folder is None else cls.load(folder)

    def need_server(self) -> bytes:
        """The broker's secret key. Raises KeysError where the folder is a worker's."""
        if self.server_secret is None:
            raise KeysError(
                f"{self.folder} has no {SERVER}.key_secret, so no broker can listen with it; {MAKE}"
            )
        return self.server_secret


def make(folder: Path) -> None:
    """Makes both pairs, readable by their owner alone. Raises KeysError where a file is there already."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise KeysError(f"can't make {folder}: {error.strerror}") from None
    _check_closed(folder, "folder")
    there = [path for name in (SERVER, CLIENT) for path in _files(folder, name) if path.exists()]
    if there:
        raise KeysError(f"{there[0]} exists; keys are never overwritten: name another folder, or remove it")
    before = os.umask(0o077)
    try:
        for name in (SERVER, CLIENT):
            create_certificates(folder, name)
    except OSError as error:
        raise KeysError(f"can't write keys to {folder}: {error.strerror}") from None
    finally:
        os.umask(before)


def _files(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.key_secret", folder / f"{name}.key"


def _read(folder: Path, name: str) -> tuple[bytes, bytes | None]:
    """A pair's public and, where it is there, secret key."""
    path = next((path for path in _files(folder, name) if path.exists()), None)
    if path is None:
        raise KeysError(f"{folder} has no {name}.key; copy it from where the keys were made, or {MAKE}")
    _check_closed(path, "file")
    try:
        public, secret = load_certificate(path)
        if len(z85.decode(public)) != 32 or (secret is not None and len(z85.decode(secret)) != 32):
            raise ValueError("a key is not 32 bytes long")
    except (ValueError, OSError, LookupError, struct.error) as error:  # z85's errors are of several kinds
        raise KeysError(f"{path} is no CURVE certificate ({error}); {MAKE}") from None
    return public, secret


def _check_closed(path: Path, what: str) -> None:
    """Raises KeysError unless the file or folder is ours, and nobody else's to read or change."""
    try:
        info = path.stat()
    except OSError as error:
        raise KeysError(f"the keys' {what} {path} can't be used: {error.strerror}; {MAKE}") from None
    if what == "folder" and not stat.S_ISDIR(info.st_mode):
        raise KeysError(f"{path} is no folder; {MAKE}")
    if info.st_uid != os.getuid():
        raise KeysError(f"{path} belongs to another user; keys must be your own: `chown -R $USER {path}`")
    if info.st_mode & 0o077:
        raise KeysError(f"others can read or change {path}; close it: `chmod go= {path}`")


class Door:
    """The broker's side: while it is open, sockets that it secured let in peers with the client's key.

    Make it before such a socket is bound, one per process: ZeroMQ has one place per context to ask.
    Raises KeysError where the keys are not a broker's.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._secret = keys.need_server()
        self._authenticator = ThreadAuthenticator(zmq.Context.instance())
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """What the authenticator asks for each handshake: whether this public key may come in."""
        return key == self._keys.client

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """For a socket that will be bound to TCP. What it is bound to already stays as it is."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # with the door closed nobody comes in, not everybody
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)

    def close(self) -> None:
        """Nobody comes in any more."""
        self._authenticator.stop()


def secure_client(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """For a socket that will be connected over TCP. Raises KeysError where the client's secret is missing."""
    if keys.client_secret is None:
        raise KeysError(f"{keys.folder} has no {CLIENT}.key_secret; copy it from where the keys were made")
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)


class Shared:
    """For sockets between workers, where both ends have the client's pair and admit no other.

    It is an :class:`adapters.net.secure.Secure`. Raises KeysError where the client's secret is missing.
    """

    def __init__(self, keys: Keys) -> None:
        if keys.client_secret is None:
            raise KeysError(
                f"{keys.folder} has no {CLIENT}.key_secret; copy it from where the keys were made"
            )
        self._public = keys.client
        self._secret = keys.client_secret

    @classmethod
    def find(cls) -> Self | None:
        """With this process's keys; None where none were made. Raises KeysError."""
        keys = Keys.find()
        return None if keys is None else cls(keys)

    def server(self, socket: zmq.Socket[bytes]) -> None:
        """For a data server's socket."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)

    def client(self, socket: zmq.Socket[bytes]) -> None:
        """For a fetcher's socket."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)

    def admits(self, key: bytes) -> bool:
        """Whether a public key, as z85 text, is the client's."""
        return key == self._public
