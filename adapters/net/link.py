"""A fetcher's connection to one data server: pieces of many blocks under way at a time, in turns."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec
import zmq

from adapters.handle import AdapterError, BadHandle, Handle
from adapters.net.secure import Secure
from adapters.net.wire import PIECE, WINDOW, Piece, Refused, Wait, Want, decode_answer, dial, encode

SILENCE_S = 3.0  #: a server that owes us something and sends nothing for so long is taken for gone
READ_LIMIT = 32  #: answers per wake-up, so that others get their turn on the loop


class Silent(AdapterError):
    """This server doesn't serve the block now; another may."""

    retryable = True


class _Pull:
    """A block on its way into a buffer."""

    def __init__(self, handle: Handle, into: memoryview, done: asyncio.Future[None]) -> None:
        self.handle = handle
        self.into = into
        self.done = done
        self.asked = 0  #: bytes
        self.here = 0


class Link:
    """One DEALER socket. To be used on one event loop only.

    Args:
        context: Whose IO thread moves the bytes.
        address: ``zmq://IP:PORT``.
        run: The run's nonce.
        secure: See :class:`adapters.net.fetch.Fetcher`.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, run: str, secure: Secure | None
    ) -> None:
        self.address = address
        self.closed = False
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._pulls: deque[_Pull] = deque()  #: with pieces that were not asked for; whose turn it is, first
        self._asked: dict[int, tuple[_Pull, memoryview]] = {}
        self._number = 0
        self._heard = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._socket = dial(context, address, secure)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read)

    async def pull(self, handle: Handle, into: memoryview) -> None:
        """Fills a buffer of ``handle.nbytes`` bytes; nothing is written to it once this has ended.

        Raises :class:`BadHandle` when the server says that there is no such block, :class:`Silent` when it
        says or does nothing.
        """
        if self.closed:
            raise Silent(f"{self.address} is given up")
        pull = _Pull(handle, into, self._loop.create_future())
        if not self._asked:
            self._heard = self._loop.time()
        self._pulls.append(pull)
        self._ask()
        try:
            await pull.done
        finally:
            if pull in self._pulls:
                self._pulls.remove(pull)

    def close(self, reason: str = "closed") -> None:
        """Ends the connection; pulls on their way end with :class:`Silent`. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=0)
        pulls = {id(pull): pull for pull, _ in self._asked.values()} | {
            id(pull): pull for pull in self._pulls
        }
        self._asked = {}
        for pull in pulls.values():
            self._fail(pull, Silent(f"{self.address}: {reason}"))

    # --- asking

    def _ask(self) -> None:
        while self._pulls and len(self._asked) < WINDOW:
            pull = self._pulls[0]
            if pull.done.done():
                self._pulls.popleft()
                continue
            size = min(PIECE, pull.handle.nbytes - pull.asked)
            self._number += 1
            want = Want(self._number, self._run, pull.handle, pull.asked, size)
            try:
                self._socket.send(encode(want), zmq.NOBLOCK)
            except zmq.Again:
                break  # the pipe holds more than the window: only a link that never came about is so full
            self._asked[self._number] = pull, pull.into[pull.asked : pull.asked + size]
            pull.asked += size
            if pull.asked == pull.handle.nbytes:
                self._pulls.popleft()
            else:
                self._pulls.rotate(-1)
        if self._watch is None and (self._asked or self._pulls):
            self._watch = self._loop.call_later(SILENCE_S, self._look)
        self._poke()

    def _look(self) -> None:
        """Whether the server still answers."""
        self._watch = None
        self._read()  # we may be late ourselves
        if self.closed or not (self._asked or self._pulls):
            return
        left = self._heard + SILENCE_S - self._loop.time()
        if left <= 0:
            self.close(f"no answer for {SILENCE_S:.0f} s")
        elif self._watch is None:
            self._watch = self._loop.call_later(left, self._look)

    # --- hearing

    def _poke(self) -> None:
        """After each send and each reading that stopped early: ZeroMQ's descriptor tells of edges only."""
        if not self._scheduled and not self.closed and self._readable():
            self._scheduled = True
            self._loop.call_soon(self._read)

    def _readable(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _read(self) -> None:
        self._scheduled = False
        for _ in range(READ_LIMIT):
            if self.closed or not self._readable():
                break
            self._heard = self._loop.time()
            self._hear(self._socket.recv(zmq.NOBLOCK))
        if not self.closed:
            self._ask()

    def _hear(self, header: bytes) -> None:
        """The rest of the message is there too: ZeroMQ hands over whole ones."""
        try:
            answer = decode_answer(header)
        except msgspec.MsgspecError:
            self._skip()
            self.close("speaks another language")
            return
        if isinstance(answer, Wait):
            self._skip()
            return
        pull, into = self._asked.pop(answer.number, (None, None))
        if isinstance(answer, Refused):
            self._skip()
            if pull is not None:
                kind = BadHandle if answer.final else Silent
                self._fail(pull, kind(f"{self.address}: {answer.reason}"))
        elif isinstance(answer, Piece) and pull is not None and into is not None and not pull.done.done():
            self._take(pull, into)
        else:
            self._skip()

    def _take(self, pull: _Pull, into: memoryview) -> None:
        received = 0
        if self._socket.getsockopt(zmq.RCVMORE):
            # An empty buffer would do for an empty piece, but recv_into takes its size for "not said".
            received = self._socket.recv_into(into if into else bytearray(1), flags=zmq.NOBLOCK)
        if received != len(into) or self._skip():
            self._fail(pull, Silent(f"{self.address}: a piece of {received} bytes instead of {len(into)}"))
            return
        pull.here += received
        if pull.here == pull.handle.nbytes:
            pull.done.set_result(None)

    def _skip(self) -> bool:
        """Drops what is left of the message; whether there was anything."""
        found = False
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv(zmq.NOBLOCK, copy=False)
            found = True
        return found

    @staticmethod
    def _fail(pull: _Pull, error: AdapterError) -> None:
        if not pull.done.done():
            pull.done.set_exception(error)
