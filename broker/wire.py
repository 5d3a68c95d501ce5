"""ZeroMQ sockets on an asyncio loop: drain on wake-up, send what has gathered, never block.

ZeroMQ's file descriptor is edge-triggered and covers both directions: after every read or write the socket's
own EVENTS must be asked again, or a message waits for the next one to arrive
(http://api.zeromq.org/master:zmq-getsockopt, ZMQ_FD).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from adapters.handle import BlockId, Chunk
from broker.protocol import Message, Peer, Release, encode

READ_LIMIT = 256  #: frames per wake-up, so that timers and the other socket get their turn
MAX_FRAME = 64 << 20  #: bytes; tensors travel out-of-band, so a larger frame is no honest one
MOST_BODY = MAX_FRAME - (1 << 20)  #: bytes of chunks' bodies in one message, so that the rest fits in, too
RETRY_S = 0.01  #: when a full pipe is tried again
PROBE_MS = 3000  #: over TCP, each end probes the other so often
#: An end that answers no probe for so long is taken for gone, and the connection made anew. What was under
#: way is lost then, so it has to be longer than twice the silence that the broker bears with (`liveness_s`):
#: so long TCP may take to go on by itself after a link was down (its pauses double, RFC 6298).
SILENT_MS = 15_000
CONNECT_MS = 2000  #: one try to connect; the kernel's own would take minutes where nobody answers
#: Messages after which a frame leaves before the wake-up's end. Without a bound all requests in flight move
#: as one convoy, and while one process works on it all others wait.
BATCH = 16
#: Bytes; a larger frame goes in parts, if it has several messages: an introduction, or what has waited for a
#: broker that stood still, may be larger than what the broker takes, which would end the connection.
LARGE = 1 << 20


class Port:
    """Reads a socket whenever it has something.

    Args:
        socket: Bound or connected; closed by :meth:`close`.
        on_frames: Gets each multipart message.
        on_drained: Called after each wake-up's reading.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_frames: Callable[[list[bytes]], None],
        on_drained: Callable[[], None],
    ) -> None:
        self.socket = socket
        self._on_frames = on_frames
        self._on_drained = on_drained
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled = False
        self._loop.add_reader(self._fd, self._read)
        self.poke()

    def poke(self) -> None:
        """Due after each send, a vain one too: it may have swallowed the edge, and then we read soon."""
        if not self._scheduled and not self.socket.closed and self._readable():
            self._scheduled = True
            self._loop.call_soon(self._read)

    def _readable(self) -> bool:
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _read(self) -> None:
        self._scheduled = False
        if self.socket.closed:
            return
        receive, readable = self.socket.recv_multipart, self._readable
        for _ in range(READ_LIMIT):
            if not readable():  # asking costs a third of the exception that a vain recv raises
                break
            self._on_frames(receive(zmq.NOBLOCK))
        else:
            self.poke()
        self._on_drained()

    def close(self, linger_ms: int = 0) -> None:
        """Stops reading and closes the socket; unsent messages get ``linger_ms``."""
        if not self.socket.closed:
            self._loop.remove_reader(self._fd)
            self.socket.close(linger=linger_ms)


def watch_over_tcp(socket: zmq.Socket[bytes]) -> None:
    """For a socket that will be bound or connected to TCP, where a cut link gives no error for minutes."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, PROBE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, SILENT_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 2 * CONNECT_MS)


def _dealer(endpoint: str) -> zmq.Socket[bytes]:
    """A socket that may connect to the endpoint."""
    keys = None
    if endpoint.startswith("tcp://"):
        from broker.keys import Keys, secure_client  # not at the head: ipc needs none of it

        keys = Keys.find()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    if endpoint.startswith("tcp://"):
        watch_over_tcp(socket)
    if endpoint.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    if keys is not None:
        try:
            secure_client(socket, keys)
        except ValueError:
            socket.close()
            raise
    return socket


class Connection:
    """A peer's DEALER connection to the broker: messages leave together, when the wake-up ends or sooner.

    Args:
        endpoint: Where the broker's ROUTER is. Over TCP, keys are used if this process has any.
        peer: This process's identity, fresh (:func:`broker.protocol.new_peer`).
        decode: One of the decoders of :mod:`broker.protocol`.
        on_message: Gets each message.
        on_release: Gets the blocks of each Release, on the loop's thread, as it is posted.
        on_broken: Called when a TCP connection has ended: what was under way may be lost, in both directions.
            It is made anew by itself.

    Raises :class:`broker.keys.KeysError` for keys that can't be used.
    """

    def __init__(
        self,
        endpoint: str,
        peer: Peer,
        decode: Callable[[bytes], list[Any]],
        on_message: Callable[[Any], None],
        on_release: Callable[[list[BlockId]], None] = lambda blocks: None,
        *,
        on_broken: Callable[[], None] | None = None,
    ) -> None:
        self.peer = peer
        self._decode = decode
        self._on_message = on_message
        self._on_release = on_release
        self._outbox: list[Message] = []
        self._released: deque[BlockId] = deque()
        self._loop = asyncio.get_running_loop()
        self._flush_due = False
        self._stuck = False  #: the pipe was full; it is tried again by and by, not with each message
        socket = self._socket = _dealer(endpoint)
        socket.setsockopt(zmq.IDENTITY, peer)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._monitor: Port | None = None
        if on_broken is not None and endpoint.startswith("tcp://"):
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._monitor = Port(monitor, lambda frames: on_broken(), lambda: None)
        socket.connect(endpoint)
        self._port = Port(socket, self._on_frames, self._flush)

    def post(self, message: Message) -> None:
        """Sends soon, in order. Never blocks; messages wait here while the broker is away."""
        self._outbox.append(message)
        if len(self._outbox) >= BATCH and not self._stuck:
            self._flush()
        elif not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush_later)

    def restart(self, messages: Sequence[Message]) -> None:
        """Sends these in the place of what waits here, which a broker that was restarted can't use.

        But it may have heard an earlier introduction, in which blocks were held that are released since.
        """
        self._outbox = [message for message in self._outbox if type(message) is Release]
        self._outbox += messages
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush_later)

    def waits(self, message: Message) -> bool:
        """Whether a message of this wake-up, or one that the broker can't take yet, may still be changed."""
        return any(waiting is message for waiting in reversed(self._outbox))

    def released(self, block: BlockId) -> None:
        """Tells the broker that we look at this block no longer. From any thread."""
        self._released.append(block)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._post_released)

    def release(self, chunk: Chunk) -> None:
        """A chunk that nobody here will unpack: its blocks go back. From any thread."""
        for handle in chunk.handles:
            self.released(handle.block)

    def _post_released(self) -> None:
        if self._released:
            blocks = [self._released.popleft() for _ in range(len(self._released))]
            self._on_release(blocks)
            self.post(Release(blocks))

    def _on_frames(self, frames: list[bytes]) -> None:
        for message in self._decode(frames[-1]):
            self._on_message(message)

    def _flush_later(self) -> None:
        self._flush_due = False
        self._flush()

    def _flush(self) -> None:
        if not self._outbox or self._socket.closed:
            return
        while self._outbox:
            frame, messages = _frame(self._outbox)
            try:
                self._socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                self._stuck = True
                if not self._flush_due:
                    self._flush_due = True
                    self._loop.call_later(RETRY_S, self._flush_later)
                break
            self._stuck = False
            self._outbox = self._outbox[messages:]
        self._port.poke()

    def close(self, linger_ms: int = 500) -> None:
        """Sends what is left, then closes."""
        self._flush()
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
        self._port.close(linger_ms)


def _frame(messages: list[Message]) -> tuple[bytes, int]:
    """The first of these as a frame, and how many they are: all, unless that is large."""
    count = len(messages)
    frame = encode(messages)
    while len(frame) > LARGE and count > 1:
        count = (count + 1) // 2
        frame = encode(messages[:count])
    return frame, count
