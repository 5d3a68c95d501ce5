"""Who may speak to a data server: what keys do to its sockets, and the door that asks for them.

Keys are read elsewhere (:mod:`broker.keys`); here is only what a data server and a fetcher need of them.
"""

from __future__ import annotations

from typing import Protocol

import zmq
from zmq.utils import z85

DOMAIN = "omni-data"  #: ZAP's name for data servers; without one, libzmq asks nobody
_PLACE = "inproc://zeromq.zap.01"  #: where libzmq asks; one per context (https://rfc.zeromq.org/spec/27/)


class Secure(Protocol):
    """A pair of CURVE keys that all who may fetch share."""

    def server(self, socket: zmq.Socket[bytes]) -> None:
        """For a socket that will be bound to TCP, in a context with a :class:`Door`."""
        ...

    def client(self, socket: zmq.Socket[bytes]) -> None:
        """For a socket that will be connected over TCP."""
        ...

    def admits(self, key: bytes) -> bool:
        """Whether the owner of this public key (z85 text) may come in."""
        ...


class Door:
    """Answers libzmq's question for each handshake of one context; read by whoever polls the sockets."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], secure: Secure) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_PLACE)
        self._secure = secure

    def answer(self) -> None:
        """One question: version, number, domain, address, identity, mechanism, and the key in 32 bytes."""
        version, number, domain, _, _, mechanism, *credentials = self.socket.recv_multipart()
        known = (
            domain == DOMAIN.encode()
            and mechanism == b"CURVE"
            and len(credentials) == 1
            and self._secure.admits(z85.encode(credentials[0]))
        )
        code, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        self.socket.send_multipart([version, number, code, text, b"", b""])
