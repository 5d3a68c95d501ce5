"""Blocks by UCX: over RDMA where there is any, else over TCP, straight from the mapping into the buffer.

The fetching side presents the ticket on an endpoint of its own; the serving side answers by tagged sends.
Tags are drawn for each ticket, so no two transfers meet; a ticket is good once. A block goes in parts, so
that both sides see it move, and give up one that doesn't. A receive is posted when its message has been
announced, not before: one without a message belongs to no connection, and UCXX can't call it back.

UCX's listener is open to all who reach the machine (it can't be bound to one address), and what it moves is
not encrypted. Who presents no ticket within a second, or a wrong one, is disconnected.

Tensors on a GPU take the way over shared memory, as all others do.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from functools import partial
from typing import Any

import numpy as np

from adapters.handle import AdapterError
from adapters.net.link import SILENCE_S, Silent
from adapters.net.ucx_thread import UcxThread
from adapters.net.wire import Ticket

PART = 8 << 20  #: bytes; of each, either side waits for the end
KEY_BYTES = 16
TICKETS = 1024  #: that were given and not presented; and connections
PRESENT_S = 10.0  #: a ticket lapses
STRANGER_S = 1.0  #: who has connected has to present a ticket
STALLED_S = 30.0  #: a transfer of which no part ends is cut off by its sender

_TAG_BITS = 64
_PART_BITS = 20  #: of the tag, for the part's number
_TAGS = (1 << _TAG_BITS) - (1 << _PART_BITS)  #: the bits that are a block's


class _Lent:
    """A block that may be asked for, or is on its way."""

    def __init__(self, data: memoryview, tag: int) -> None:
        self.data = data
        self.tag = tag
        self.since = time.monotonic()


class _Guest:
    """A connection to our listener."""

    def __init__(self, endpoint: Any) -> None:
        self.endpoint = endpoint
        self.key = np.zeros(KEY_BYTES, np.uint8)
        self.known = False  #: it has presented a good ticket
        self.closed = False
        self.parts = 0  #: on their way
        self.moved = time.monotonic()


class UcxLender:
    """Serves blocks for tickets. Starts a thread; raises AdapterError when UCX can't be started."""

    name = "ucx"

    def __init__(self) -> None:
        self._lent: dict[bytes, _Lent] = {}
        self._guests: list[_Guest] = []
        self._listener: Any = None
        self._port = 0
        self._thread = UcxThread("ucx-lender", self._begin, lambda: False, self._tick)

    def lend(self, number: int, data: memoryview) -> Ticket:
        """See :meth:`adapters.net.movers.Lender.lend`."""
        if len(self._lent) >= TICKETS:
            raise AdapterError("this data server has given too many tickets")
        key = secrets.token_bytes(KEY_BYTES)
        tag = secrets.randbits(_TAG_BITS - _PART_BITS) << _PART_BITS
        lent = _Lent(data, tag)

        def add() -> None:
            self._lent[key] = lent
            self._thread.busy = True

        self._thread.call(add)
        return Ticket(number, self._port, key, tag)

    def close(self) -> None:
        """See :meth:`adapters.net.movers.Lender.close`."""
        self._thread.call(self._end)
        self._thread.close()

    # --- on the thread

    def _begin(self, thread: UcxThread) -> None:
        self._thread = thread
        self._listener = thread.api.UCXListener.create(thread.worker, 0, self._connected)
        self._port = self._listener.port

    def _connected(self, request: int) -> None:
        guest = _Guest(self._listener.create_endpoint_from_conn_request(request, True))
        self._guests.append(guest)
        self._thread.busy = True
        if len(self._guests) > TICKETS:
            self._leave(guest)
        else:
            self._listen(guest)

    def _listen(self, guest: _Guest) -> None:
        request = guest.endpoint.stream_recv(self._thread.array(guest.key))
        self._thread.watch(request, lambda error: self._presented(guest, error), guest)

    def _presented(self, guest: _Guest, error: Exception | None) -> None:
        lent = None if error is not None else self._lent.pop(guest.key.tobytes(), None)
        if lent is None:
            self._leave(guest)
            return
        if guest.closed:
            return
        guest.known = True
        guest.moved = time.monotonic()
        for number, part in enumerate(parts(lent.data)):
            array = self._thread.array(part)
            request = guest.endpoint.tag_send(array, self._thread.api.UCXXTag(lent.tag + number))
            guest.parts += 1
            self._thread.watch(request, lambda error: self._sent(guest, error), (array, lent.data, guest))
        self._listen(guest)

    def _sent(self, guest: _Guest, error: Exception | None) -> None:
        guest.parts -= 1
        guest.moved = time.monotonic()
        if error is not None:
            self._leave(guest)

    def _leave(self, guest: _Guest) -> None:
        if not guest.closed:
            guest.closed = True
            self._thread.close_endpoint(guest.endpoint)
            self._guests.remove(guest)

    def _tick(self) -> None:
        now = time.monotonic()
        for key, lent in list(self._lent.items()):
            if now - lent.since > PRESENT_S:
                del self._lent[key]
        for guest in list(self._guests):
            limit = STALLED_S if guest.known else STRANGER_S
            if (guest.parts or not guest.known) and now - guest.moved > limit:
                self._leave(guest)
        self._thread.busy = bool(self._lent or self._guests)

    def _end(self) -> None:
        self._lent.clear()
        for guest in list(self._guests):
            self._leave(guest)
        self._listener = None


class _Pull:
    """A block on its way."""

    def __init__(self, tag: int, into: memoryview, done: asyncio.Future[None]) -> None:
        self.tag = tag
        self.into = into
        self.done = done
        self.parts = parts(into)
        self.expected = len(self.parts)  #: that were not announced yet
        self.left = len(self.parts)  #: that are not here
        self.moved = time.monotonic()


class _Far:
    """A connection to a lender."""

    def __init__(self, address: tuple[str, int], endpoint: Any) -> None:
        self.address = address
        self.endpoint = endpoint
        self.pulls: list[_Pull] = []


class UcxPuller:
    """Presents tickets. Starts a thread; raises AdapterError when UCX can't be started."""

    name = "ucx"

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._fars: dict[tuple[str, int], _Far] = {}
        self._closed = False
        self._thread = UcxThread("ucx-puller", self._begin, self._look, self._tick)

    async def pull(self, host: str, ticket: Ticket, into: memoryview) -> None:
        """See :meth:`adapters.net.movers.Puller.pull`."""
        if self._closed:  # in the moment in which the ticket came: the thread would never look at it
            raise Silent("UCX: closed")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pull = _Pull(ticket.tag, into, done)
        self._thread.call(partial(self._present, (host, ticket.port), ticket, pull))
        try:
            await done
        finally:
            del done, pull  # else an error's traceback and the future keep each other, and the buffer

    def close(self) -> None:
        """See :meth:`adapters.net.movers.Puller.close`."""
        self._closed = True
        self._thread.call(self._end)
        self._thread.close()

    # --- on the thread

    def _begin(self, thread: UcxThread) -> None:
        self._thread = thread

    def _present(self, address: tuple[str, int], ticket: Ticket, pull: _Pull) -> None:
        api, array = self._thread.api, self._thread.array
        far = self._fars.get(address)
        try:
            if far is None:
                endpoint = api.UCXEndpoint.create(self._thread.worker, *address, True)
                far = self._fars[address] = _Far(address, endpoint)
            far.pulls.append(pull)
            self._thread.busy = True
            key = array(np.frombuffer(ticket.key, np.uint8))
            request = far.endpoint.stream_send(key)
            self._thread.watch(request, lambda error: self._shown(far, error), key)
        except Exception as error:  # UCXX raises many kinds
            self._settle(pull, error)
            if far is not None:
                self._leave(far, error)

    def _look(self) -> bool:
        """Receives what has been announced; whether anything has."""
        api, found = self._thread.api, False
        mask = api.UCXXTagMask(_TAGS)
        for far in list(self._fars.values()):
            if far.pulls and not far.endpoint.alive:
                self._leave(far, ConnectionResetError("the connection broke"))
            for pull in list(far.pulls):
                while pull.expected and far.pulls:
                    message = self._thread.worker.tag_probe(api.UCXXTag(pull.tag), mask, True)
                    if not message.matched:
                        break
                    found = True
                    self._receive(far, pull, message)
        return found

    def _receive(self, far: _Far, pull: _Pull, message: Any) -> None:
        number = message.sender_tag.value & ~_TAGS
        if number >= len(pull.parts) or message.length != len(pull.parts[number]):
            self._leave(far, AdapterError(f"part {number} of a block has {message.length} bytes"))
            return
        pull.expected -= 1
        pull.moved = time.monotonic()
        target = self._thread.array(pull.parts[number])
        request = far.endpoint.tag_recv_with_handle(target, message)
        self._thread.watch(request, lambda error: self._received(far, pull, error), (target, pull))

    def _shown(self, far: _Far, error: Exception | None) -> None:
        if error is not None:
            self._leave(far, error)

    def _received(self, far: _Far, pull: _Pull, error: Exception | None) -> None:
        if error is not None:
            self._leave(far, error)
            return
        pull.left -= 1
        pull.moved = time.monotonic()
        if not pull.left and pull in far.pulls:
            far.pulls.remove(pull)
            self._settle(pull, None)

    def _leave(self, far: _Far, error: Exception) -> None:
        """Ends a connection. All receives on it end too; until then their memory is kept."""
        if self._fars.get(far.address) is far:
            del self._fars[far.address]
            self._thread.close_endpoint(far.endpoint)
        pulls, far.pulls = far.pulls, []
        for pull in pulls:
            self._thread.drop(self._thread.api.UCXXTag(pull.tag), self._thread.api.UCXXTagMask(_TAGS))
            self._settle(pull, error)

    @staticmethod
    def _settle(pull: _Pull, error: Exception | None) -> None:
        def settle() -> None:
            if pull.done.done():
                return
            if error is None:
                pull.done.set_result(None)
            else:
                pull.done.set_exception(Silent(f"UCX: {error}"))

        loop = pull.done.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle)

    def _tick(self) -> None:
        now = time.monotonic()
        for far in list(self._fars.values()):
            if any(now - pull.moved > self._silence_s for pull in far.pulls):
                self._leave(far, TimeoutError(f"nothing moved for {self._silence_s:g} s"))
        self._thread.busy = any(far.pulls for far in self._fars.values())

    def _end(self) -> None:
        for far in list(self._fars.values()):
            self._leave(far, AdapterError("closed"))


def parts(data: memoryview) -> list[memoryview]:
    """A block in parts; one that is empty has none."""
    return [data[start : start + PART] for start in range(0, len(data), PART)]
