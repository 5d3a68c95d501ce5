"""A UCX worker, and the thread that is the only one to touch it."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from adapters.handle import AdapterError
from adapters.net.woken import Woken

TICK_S = 0.25
CLOSE_S = 2.0  #: what is under way when all is closed gets so long

_log = logging.getLogger(__name__)


class _Watched(NamedTuple):
    request: Any
    done: Callable[[Exception | None], None]
    kept: object


class UcxThread:
    """Runs functions on the thread, makes progress, and tells of requests that have ended.

    Args:
        name: Of the thread.
        begin: Called on it first, with us.
        look: Called on it after each progress; whether it found something to do.
        tick: Called on it about four times a second while anything is :attr:`busy`.

    Raises AdapterError when UCX can't be started.
    """

    def __init__(
        self,
        name: str,
        begin: Callable[[UcxThread], None],
        look: Callable[[], bool],
        tick: Callable[[], None],
    ) -> None:
        self.api: Any = None  #: the module of UCXX's classes
        self.array: Any = None  #: its class for buffers
        self.worker: Any = None
        self.busy = False  #: whether there is something to look after in ticks
        self._begin = begin
        self._look = look
        self._tick = tick
        self._calls: deque[Callable[[], None]] = deque()
        self._watched: list[_Watched] = []
        self._error: Exception | None = None
        self._ready = threading.Event()
        self._thread = Woken(name, self._run)
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._thread.close()
            raise AdapterError(f"UCX can't be started: {self._error}") from self._error

    def call(self, function: Callable[[], None]) -> None:
        """Has a function called on the thread soon. From any thread; after :meth:`close` it may not be."""
        self._calls.append(function)
        if not self._thread.closing:
            self._thread.wake()

    def watch(self, request: Any, done: Callable[[Exception | None], None], kept: object) -> None:
        """Calls ``done`` when a request has ended; until then keeps what it works on. On the thread only."""
        self._watched.append(_Watched(request, done, kept))

    def close_endpoint(self, endpoint: Any) -> None:
        """Ends a connection without waiting for the other side; its requests end with errors. Once."""
        if endpoint.alive:  # one that broke is closed already: for it, UCXX makes a request of a null pointer
            self.watch(endpoint.close(), lambda error: None, endpoint)

    def close(self) -> None:
        """Ends the thread; requests that don't end in time keep their memory. Idempotent."""
        if self._thread.end():
            self._thread.close()

    # --- the thread

    def _run(self) -> None:
        try:
            self._start()
            self._begin(self)
        except Exception as error:
            self._error = error
            return
        finally:
            self._ready.set()
        poller = select.poll()
        poller.register(self.worker.epoll_file_descriptor, select.POLLIN)
        poller.register(self._thread.fd, select.POLLIN)
        ticked = time.monotonic()
        while not self._thread.closing:
            self.worker.progress()
            found = self._guarded(self._look)
            moved = self._work() or found
            if self.busy and time.monotonic() - ticked >= TICK_S:
                ticked = time.monotonic()
                self._guarded(self._tick)
            if moved or not self.worker.arm():
                continue
            poller.poll(TICK_S * 1000 if self.busy else None)
            self._thread.slept()
        self._stop()

    def _start(self) -> None:
        # Importing UCXX sets a variable that UCX, where it was built without CUDA, warns of.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array

        self.api, self.array = libucxx, Array
        # Hosts share no memory, even where two of them are on one machine; and UCX's own shared memory, in a
        # container's small /dev/shm, fails late. Nothing here lies on a GPU either, of whose memory UCX takes
        # some in every process. Whoever sets UCX_TLS knows better.
        config = {} if "UCX_TLS" in os.environ else {"TLS": "^sm,cuda"}
        feature = libucxx.Feature
        context = libucxx.UCXContext(config, feature_flags=(feature.TAG, feature.STREAM, feature.WAKEUP))
        self.worker = libucxx.UCXWorker(context)
        self.worker.init_blocking_progress_mode()

    def _work(self) -> bool:
        """Calls that wait, and requests that have ended; whether there were any."""
        moved = False
        while self._calls:
            moved = True
            self._guarded(self._calls.popleft())
        ended = [watched for watched in self._watched if watched.request.completed]
        if ended:
            moved = True
            self._watched = [watched for watched in self._watched if watched not in ended]
            for watched in ended:
                self._guarded(partial(watched.done, _error_of(watched.request)))
        return moved

    @staticmethod
    def _guarded(function: Callable[[], object]) -> bool:
        """What a function gives, as a truth."""
        try:
            return bool(function())
        except Exception:  # a fault in one transfer must not end all
            _log.exception("UCX")
            return False

    def _stop(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        self._work()
        while self._watched and time.monotonic() < deadline:
            self.worker.progress()
            if not self._work():
                time.sleep(0.001)
        if self._watched:  # UCX may still write to their memory, and its destructors would wait for ever
            _log.warning("%d UCX requests did not end in %g s", len(self._watched), CLOSE_S)
            for lost in (self.worker, self._watched):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(lost))
        self.drop(self.api.UCXXTag(0), self.api.UCXXTagMask(0))
        self.worker = None

    def drop(self, tag: Any, mask: Any) -> None:
        """Forgets messages that nobody will receive: a worker that ends would wait for them to come whole."""
        while self.worker.tag_probe(tag, mask, True).matched:
            pass


def _error_of(request: Any) -> Exception | None:
    try:
        request.check_error()
    except Exception as error:
        return error
    return None
