"""A fetcher's connection to one data server: pieces of many blocks under way at a time, in turns."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, NamedTuple

import msgspec
import zmq

from adapters.handle import AdapterError, BadHandle, Handle
from adapters.net.secure import Secure
from adapters.net.wire import (
    PIECE,
    WINDOW,
    Answer,
    Lend,
    Piece,
    Refused,
    Ticket,
    Want,
    decode_answer,
    dial,
    encode,
)

SILENCE_S = 3.0  #: a server that owes us something and sends nothing for so long is taken for gone
READ_LIMIT = 2  #: answers per wake-up, so that others get their turn on the loop

_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Silent(AdapterError):
    """This server doesn't give us the block now; another may."""

    retryable = True


class Target:
    """Where a block goes, and how much of it is here: its first ``here`` bytes."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.here = 0


class _Pull:
    """A block on its way."""

    def __init__(self, handle: Handle, target: Target, done: asyncio.Future[None]) -> None:
        self.handle = handle
        self.target = target
        self.done = done
        self.asked = target.here

    def fail(self, error: AdapterError) -> None:
        _fail(self.done, error)


class _Asked(NamedTuple):
    pull: _Pull
    offset: int
    nbytes: int


class Link:
    """One DEALER socket. To be used on one event loop only.

    Args:
        context: Whose IO thread moves the bytes.
        address: ``IP:PORT``.
        run: The run's nonce.
        secure: The keys, if there are any.
        silence_s: See :data:`SILENCE_S`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        run: str,
        secure: Secure | None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.address = address
        self.closed = False
        self._run = run
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._pulls: deque[_Pull] = deque()  #: with pieces that were not asked for; whose turn it is, first
        self._asked: dict[int, _Asked] = {}
        self._tickets: dict[int, asyncio.Future[Ticket]] = {}
        self._number = 0
        self._heard = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._socket, self._monitor = dial(context, address, secure, _LOST)
        self._fds = [int(socket.getsockopt(zmq.FD)) for socket in (self._socket, self._monitor)]
        for fd in self._fds:
            self._loop.add_reader(fd, self._read)

    async def pull(self, handle: Handle, target: Target) -> None:
        """Fills the target from ``target.here`` on; nothing is written to it once this has ended.

        Raises :class:`BadHandle` when the server says that there is no such block, :class:`Silent` when it
        says or does nothing.
        """
        if self.closed:
            raise Silent(f"{self.address}: given up")
        pull = _Pull(handle, target, self._loop.create_future())
        self._begin()
        self._pulls.append(pull)
        self._ask()
        try:
            await pull.done
        finally:
            if pull in self._pulls:
                self._pulls.remove(pull)
            del pull  # else an error's traceback and the future keep each other, and the target

    async def ticket(self, handle: Handle) -> Ticket:
        """Asks for one (:mod:`adapters.net.movers`). Raises as :meth:`pull` does."""
        if self.closed:
            raise Silent(f"{self.address}: given up")
        self._begin()
        self._number += 1
        number = self._number
        asked: asyncio.Future[Ticket] = self._loop.create_future()
        try:
            self._socket.send(encode(Lend(number, self._run, handle)), zmq.NOBLOCK)
        except zmq.Again:
            raise Silent(f"{self.address}: no connection yet") from None
        self._tickets[number] = asked
        self._ask()
        try:
            return await asked
        finally:
            self._tickets.pop(number, None)
            del asked  # as in `pull`

    def close(self, reason: str = "closed") -> None:
        """Ends the connection; pulls on their way end with :class:`Silent`. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._watch is not None:
            self._watch.cancel()
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        error = Silent(f"{self.address}: {reason}")
        for pull in [asked.pull for asked in self._asked.values()] + list(self._pulls):
            pull.fail(error)
        for ticket in self._tickets.values():
            _fail(ticket, error)
        self._asked = {}

    # --- asking

    def _begin(self) -> None:
        if not self._owed():
            self._heard = self._loop.time()

    def _owed(self) -> bool:
        """Whether the server has to say something."""
        return bool(self._asked or self._pulls or self._tickets)

    def _ask(self) -> None:
        while self._pulls and len(self._asked) < WINDOW:
            pull = self._pulls[0]
            if pull.done.done():
                self._pulls.popleft()
                continue
            size = min(PIECE, pull.handle.nbytes - pull.asked)
            want = Want(self._number + 1, self._run, pull.handle, pull.asked, size)
            try:
                self._socket.send(encode(want), zmq.NOBLOCK)
            except zmq.Again:
                break  # questions of those who have given up are still waiting for a connection
            self._number += 1
            self._asked[self._number] = _Asked(pull, pull.asked, size)
            pull.asked += size
            if pull.asked == pull.handle.nbytes:
                self._pulls.popleft()
            else:
                self._pulls.rotate(-1)
        if self._watch is None and self._owed():
            self._watch = self._loop.call_later(self._silence_s, self._look)
        self._poke()

    def _look(self) -> None:
        """Whether the server still answers."""
        self._watch = None
        self._read()  # it may be us who are late
        if self.closed or not self._owed():
            return
        left = self._heard + self._silence_s - self._loop.time()
        if left <= 0:
            self.close(f"no answer for {self._silence_s:g} s")
        elif self._watch is None:
            self._watch = self._loop.call_later(left, self._look)

    # --- hearing

    def _poke(self) -> None:
        """After each send and each reading that stopped early: ZeroMQ's descriptor tells of edges only."""
        if not self._scheduled and not self.closed and _readable(self._socket):
            self._scheduled = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._scheduled = False
        for _ in range(READ_LIMIT):
            if self.closed or not _readable(self._socket):
                break
            self._heard = self._loop.time()
            self._hear(self._socket.recv(zmq.NOBLOCK))
        if self.closed:
            return
        # What arrived before the end of the connection was read first, unless it is a lot.
        if _readable(self._monitor) and not _readable(self._socket):
            self.close("the connection broke")
        else:
            self._ask()

    def _hear(self, header: bytes) -> None:
        """One answer. The rest of the message is there too: ZeroMQ hands over whole ones."""
        try:
            answer: Answer | None = decode_answer(header)
        except (msgspec.MsgspecError, RecursionError):  # the latter: nested without end
            answer = None
        asked = self._asked.pop(answer.number, None) if isinstance(answer, Piece | Refused) else None
        if isinstance(answer, Piece) and asked is not None and not asked.pull.done.done():
            self._take(asked)
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv(zmq.NOBLOCK, copy=False)
        ticket = self._tickets.get(answer.number) if isinstance(answer, Ticket | Refused) else None
        if isinstance(answer, Refused):
            error = (BadHandle if answer.final else Silent)(f"{self.address}: {answer.reason}")
            if asked is not None:
                asked.pull.fail(error)
            elif ticket is not None:
                _fail(ticket, error)
        elif isinstance(answer, Ticket):
            if ticket is not None and not ticket.done():
                ticket.set_result(answer)
        elif answer is None:
            self.close("it speaks another language")

    def _take(self, asked: _Asked) -> None:
        """The bytes of a piece."""
        pull, offset, nbytes = asked
        target = pull.target
        received = -1
        if self._socket.getsockopt(zmq.RCVMORE):
            # An empty buffer would do for an empty piece, but for recv_into 0 is "as much as there is".
            into = target.buffer[offset : offset + nbytes] if nbytes else bytearray(1)
            received = self._socket.recv_into(into, flags=zmq.NOBLOCK)
        if received != nbytes or offset != target.here:
            pull.fail(Silent(f"{self.address}: its answer has {received} bytes instead of {nbytes}"))
            return
        target.here += nbytes
        if target.here == pull.handle.nbytes:
            pull.done.set_result(None)


def _fail(future: asyncio.Future[Any], error: AdapterError) -> None:
    if not future.done():
        future.set_exception(error)


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
