"""The data server: gives other hosts the blocks that lie on this one.

It serves every arena and the disk store of its host, not only its own process's, so any living server of a
host stands in for another. It believes nothing of a question: :class:`adapters.reader.Reader` checks each
handle against the file itself. Bytes leave straight from the mapping.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import msgspec
import zmq

from adapters import tensor
from adapters.handle import AdapterError, BadHandle, Handle
from adapters.net.movers import Lender, has_ucx
from adapters.net.secure import Door, Secure
from adapters.net.wire import (
    PIECE,
    Answer,
    Lend,
    Piece,
    Refused,
    Ticket,
    Wait,
    Want,
    decode_question,
    encode,
    listen,
)
from adapters.net.woken import Woken
from adapters.reader import Reader

BURST = 64  #: questions that are answered before the other sockets are looked at
FILES = 256 << 20  #: bytes of files that were read and may be asked for again; one may be larger
FILE_KEPT_S = 5.0  #: for so long
READERS = 2  #: threads that read files
WAITING = 1024  #: questions that wait for files; more are turned away
_TICK_MS = 1000

_log = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    peer: bytes
    want: Want


class _File:
    """A file of the disk store, being read or read."""

    def __init__(self) -> None:
        self.waiting: list[_Waiting] = []
        self.data: bytes | None = None
        self.used = time.monotonic()


class DataServer:
    """Serves the blocks of one run on this host. Has a thread of its own; :meth:`close` ends it.

    Args:
        run: The broker run's nonce, 16 hex digits; questions about other runs are refused.
        address: The IP address to listen on; the port is drawn.
        reader: Where the blocks are; its store, if it has one, is served too.
        secure: The keys; None only on loopback.
        ucx: Whether blocks may go by UCX too, where it is installed.

    Raises :class:`AdapterError` when it can't listen there.
    """

    def __init__(
        self, run: str, address: str, reader: Reader, *, secure: Secure | None, ucx: bool = True
    ) -> None:
        self._run = run
        self._reader = reader
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._door: Door | None = None
        self._files: dict[tuple[str, int], _File] = {}
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="data-file")
        self._read: deque[tuple[tuple[str, int], bytes | BadHandle]] = deque()
        self._waiting = 0
        self._lender: Lender | None = None
        try:
            if secure is not None:
                self._door = Door(self._context, secure)
            self._socket, port = listen(self._context, address, secure)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = Woken("data-server", self._serve)
        host = f"[{address}]" if ":" in address else address
        self.addresses = [f"zmq://{host}:{port}"]  #: what the book has of us
        if ucx and has_ucx():
            self.addresses.append(f"ucx://{host}:{port}")  # where to ask for tickets
            self._threads.submit(self._start_ucx)
        self._thread.start()

    @property
    def lends(self) -> bool:
        """Whether blocks go by UCX from here, by now."""
        return self._lender is not None

    def close(self) -> None:
        """Ends the thread and frees the port; what is under way is cut off. Idempotent."""
        if not self._thread.end():
            return
        self._threads.shutdown()
        if self._lender is not None:
            self._lender.close()
        self._context.destroy(linger=0)
        self._thread.close()

    def _start_ucx(self) -> None:
        """Beside everything else: its libraries take a second to load. Until then blocks go in pieces."""
        from adapters.net.ucx import UcxLender

        try:
            self._lender = UcxLender()
        except Exception as error:  # ImportError too: the host may lack what it needs
            _log.warning("no blocks go by UCX: %s", error)

    # --- the thread

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._thread.fd, zmq.POLLIN)
        if self._door is not None:
            poller.register(self._door.socket, zmq.POLLIN)
        tick = time.monotonic()
        while not self._thread.closing:
            ready = dict(poller.poll(_TICK_MS if self._files else None))
            if self._door is not None and self._door.socket in ready:
                self._door.answer()
            if self._thread.fd in ready:
                self._thread.slept()
            while self._read:
                self._has_read(*self._read.popleft())
            if self._socket in ready:
                self._drain()
            if self._files and time.monotonic() - tick > _TICK_MS / 1000:
                tick = time.monotonic()
                self._each_second(tick)

    def _drain(self) -> None:
        for _ in range(BURST):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                question = decode_question(b"".join(frames))
            except (msgspec.MsgspecError, RecursionError) as error:  # the latter: nested without end
                self._send(peer, Refused(0, f"no question: {error}", final=True))
                continue
            number, handle = question.number, question.handle
            try:
                if question.run != self._run:
                    raise AdapterError(f"this data server serves another run than {question.run[:16]!r}")
                tensor.storage(handle.dtype, handle.shape, handle.nbytes)
                if isinstance(question, Want):
                    self._give(peer, question)
                else:
                    self._send(peer, self._lend(question))
            except AdapterError as error:
                self._send(peer, Refused(number, str(error), final=isinstance(error, BadHandle)))
            except Exception:  # a fault of ours must not take the host's blocks away from everybody
                _log.exception("a question about %s failed", handle.block.place[:80])
                self._send(peer, Refused(number, "the data server failed; see its log", final=False))

    def _give(self, peer: bytes, want: Want) -> None:
        handle = want.handle
        if not 0 <= want.offset <= handle.nbytes - want.nbytes or not 0 <= want.nbytes <= PIECE:
            raise BadHandle(f"no piece of {want.nbytes} bytes at {want.offset} of {handle.nbytes}")
        data = self._in_memory(handle)
        if data is not None:
            self._send(peer, Piece(want.number), data[want.offset : want.offset + want.nbytes])
        else:
            self._from_file(_Waiting(peer, want))

    def _lend(self, question: Lend) -> Ticket:
        data = self._in_memory(question.handle)
        if self._lender is None or data is None:
            raise AdapterError("only what lies in memory goes by UCX, and only where UCX has been started")
        return self._lender.lend(question.number, data)

    def _in_memory(self, handle: Handle) -> memoryview | None:
        """The block, or None where a file has to be read for it."""
        if handle.transport == "disk":
            return None
        if handle.transport != "shm":
            raise BadHandle(f"unknown transport {handle.transport[:40]!r}")
        if not handle.block.place.startswith(f"omni-{self._run}-"):
            raise BadHandle(f"{handle.block.place[:80]!r} is not of this run")
        try:
            return self._reader.view(handle)
        except BadHandle:
            if handle.copy:
                return None
            raise

    # --- files

    def _from_file(self, question: _Waiting) -> None:
        handle = question.want.handle
        key = (handle.file, handle.nbytes)
        file = self._files.get(key)
        if file is not None and file.data is not None:
            self._send_part(question, file)
            return
        if self._reader.store is None or self._reader.store.transport != "disk":
            raise AdapterError("this data server has no disk store")
        if self._waiting >= WAITING:
            raise AdapterError("this data server has too many files to read")
        if file is None:
            file = self._files[key] = _File()
            self._threads.submit(partial(self._read_file, *key))
        file.waiting.append(question)
        self._waiting += 1

    def _read_file(self, place: str, nbytes: int) -> None:
        """On a thread of its own: files are checked as they are read, a millisecond or more for each MiB."""
        assert self._reader.store is not None
        result: bytes | BadHandle
        try:
            result = self._reader.store.read(place, nbytes)
        except BadHandle as error:
            result = error
        except Exception as error:  # MemoryError: others wait for an answer all the same
            result = BadHandle(f"{place} can't be read: {error}")
        self._read.append(((place, nbytes), result))
        self._thread.wake()

    def _has_read(self, key: tuple[str, int], result: bytes | BadHandle) -> None:
        file = self._files[key]
        waiting, file.waiting = file.waiting, []
        self._waiting -= len(waiting)
        if isinstance(result, BadHandle):
            del self._files[key]
            for peer, want in waiting:
                self._send(peer, Refused(want.number, str(result), final=True))
            return
        file.data = result
        for question in waiting:
            self._send_part(question, file)
        self._trim(FILES)

    def _send_part(self, question: _Waiting, file: _File) -> None:
        assert file.data is not None
        file.used = time.monotonic()
        want = question.want
        part = memoryview(file.data)[want.offset : want.offset + want.nbytes]
        self._send(question.peer, Piece(want.number), part)

    def _each_second(self, now: float) -> None:
        for key, file in list(self._files.items()):
            for peer, want in file.waiting:
                self._send(peer, Wait(want.number))
            if file.data is not None and now - file.used > FILE_KEPT_S:
                del self._files[key]

    def _trim(self, limit: int) -> None:
        """Forgets the files that were not asked for the longest, all but one if need be."""
        there = sorted((file.used, key) for key, file in self._files.items() if file.data is not None)
        total = sum(nbytes for _, (_, nbytes) in there)
        for _, key in there[:-1]:
            if total <= limit:
                return
            total -= key[1]
            del self._files[key]

    def _send(self, peer: bytes, answer: Answer, data: memoryview | None = None) -> None:
        """Whoever has gone, or reads nothing, goes without: a fetcher asks again, or elsewhere."""
        frames: list[bytes | memoryview] = [peer, encode(answer)]
        if data is not None:
            frames.append(data)
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
