"""What fetchers and data servers say to each other, and the sockets they say it on.

A fetcher asks for pieces of blocks, a few at a time, and gets one answer for each: two frames, a header and
the bytes. So a server remembers nothing of its peers; what is under way to one is bounded by what it asked
for; and a block that one server has begun, another can finish.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec
import zmq

from adapters.handle import AdapterError, Handle
from adapters.net.secure import DOMAIN, Secure

PIECE = 4 << 20  #: bytes of a piece; a server sends no larger one
WINDOW = 6  #: pieces that a fetcher asks one server for at a time
PIPE = 32  #: answers that wait for a peer; those beyond it are dropped: who asks for more is no fetcher
LONGEST_QUESTION = 64 << 10  #: bytes; libzmq ends the connection of who sends a longer one

_CURVE = 4096  #: bytes; encrypted frames are some longer, and one of the library's own must fit too
HEARTBEAT_MS = 2000
SILENT_MS = 8000  #: a link whose other end says nothing for so long is taken down and made anew
HANDSHAKE_MS = 5000


class Want(msgspec.Struct, array_like=True, tag="want"):
    """Fetcher -> server: send me bytes ``offset`` to ``offset + nbytes`` of this block."""

    number: int  #: of the question; the answer bears it
    run: str  #: the run's nonce
    handle: Handle
    offset: int
    nbytes: int


class Lend(msgspec.Struct, array_like=True, tag="lend"):
    """Fetcher -> server: give me a ticket for this block (:mod:`adapters.net.movers`)."""

    number: int
    run: str
    handle: Handle


class Ticket(msgspec.Struct, array_like=True, tag="ticket"):
    """Server -> fetcher: a block waits where this is presented, once, soon."""

    number: int
    port: int  #: of the same host
    key: bytes  #: 16, secret
    tag: int  #: 64 bits, the last 20 zero: those number the block's parts


class Piece(msgspec.Struct, array_like=True, tag="piece"):
    """Server -> fetcher: the next frame holds the bytes."""

    number: int


class Wait(msgspec.Struct, array_like=True, tag="wait"):
    """Server -> fetcher: it takes a while, I am reading a file."""

    number: int


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """Server -> fetcher: there will be no bytes."""

    number: int
    reason: str
    final: bool  #: the block is gone, or was never there: no use in asking another server of the host


Question = Want | Lend
Answer = Piece | Ticket | Wait | Refused

encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Question).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def listen(
    context: zmq.Context[zmq.Socket[bytes]], address: str, secure: Secure | None
) -> tuple[zmq.Socket[bytes], int]:
    """A server's socket on a free port of an IP address, and the port. Raises :class:`AdapterError`."""
    socket = context.socket(zmq.ROUTER)
    _common(socket, address)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, PIPE)
    socket.setsockopt(zmq.RCVHWM, PIPE)
    socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_QUESTION)
    try:
        if secure is not None:
            socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a door nobody comes in, not everybody
            secure.server(socket)
        socket.bind(f"tcp://{_bracketed(address)}:*")
        port = urlsplit(socket.getsockopt_string(zmq.LAST_ENDPOINT)).port
    except zmq.ZMQError as error:
        socket.close()
        raise AdapterError(
            f"no data server can listen on {address}: {error.strerror}; --data-host names another address"
        ) from None
    except BaseException:
        socket.close()
        raise
    assert port is not None
    return socket, port


def dial(
    context: zmq.Context[zmq.Socket[bytes]], address: str, secure: Secure | None, events: int
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A fetcher's socket to a server at ``IP:PORT``, and one that tells of events of it."""
    socket = context.socket(zmq.DEALER)
    try:
        _common(socket, address.rpartition(":")[0])
        socket.setsockopt(zmq.SNDHWM, PIPE)
        socket.setsockopt(zmq.RCVHWM, PIPE)
        socket.setsockopt(zmq.MAXMSGSIZE, PIECE + _CURVE)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if secure is not None:
            secure.client(socket)
        monitor = socket.get_monitor_socket(events)
        socket.connect(f"tcp://{address}")
    except BaseException:
        socket.close()
        raise
    return socket, monitor


def _common(socket: zmq.Socket[bytes], host: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
