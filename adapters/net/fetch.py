"""Pulls blocks from other hosts into this process's memory, from whichever data server of theirs lives."""

from __future__ import annotations

import asyncio
import contextlib
import os

import numpy as np
import zmq

from adapters.handle import AdapterError, Handle, Unreachable
from adapters.host import host_of
from adapters.net.link import SILENCE_S, Link, Silent, Target
from adapters.net.secure import Secure

Book = dict[str, list[str]]  #: name of a host, or of a disk store -> addresses of its data servers

_PAUSE_S = 0.25  #: before the addresses that were of no use are tried again


def default_patience_s() -> float:
    """Seconds that a host may be silent: ``OMNI_FETCH_S``, else 20."""
    return float(os.environ.get("OMNI_FETCH_S") or 20)


class Fetcher:
    """Pulls blocks from other hosts. To be used on one event loop only.

    Args:
        run: The broker run's nonce.
        secure: The keys; None only for data servers on loopback.
        patience_s: How long a host may be silent; by default :func:`patience_s`.
        silence_s: How long one server may be, see :data:`adapters.net.link.SILENCE_S`.
    """

    def __init__(
        self,
        run: str,
        *,
        secure: Secure | None,
        patience_s: float | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._run = run
        self._secure = secure
        self._patience_s = default_patience_s() if patience_s is None else patience_s
        self._silence_s = silence_s
        self._book: Book = {}
        self._links: dict[str, Link] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._changed = asyncio.Event()

    @property
    def book(self) -> Book:
        """Who serves what, as the broker sent it."""
        return self._book

    @book.setter
    def book(self, book: Book) -> None:
        self._book = book
        known = {address for addresses in book.values() for address in addresses}
        for address in [address for address in self._links if address not in known]:
            self._links.pop(address).close("it has left")
        self._changed.set()

    async def fetch(self, handle: Handle, transport: str = "auto") -> memoryview:
        """The block's bytes, in a writable buffer of ``handle.nbytes`` bytes that is nobody else's.

        Raises :class:`BadHandle` when the block's host says that it is gone, :class:`Unreachable` when
        nothing of it has come from that host for ``patience_s``, and AdapterError for a transport that
        doesn't lead there.
        """
        if transport not in ("auto", "zmq"):
            raise AdapterError(f"transport {transport!r} does not reach other hosts here")
        loop = asyncio.get_running_loop()
        target = Target(memoryview(np.empty(handle.nbytes, np.uint8)))
        deadline = loop.time() + self._patience_s
        tried: dict[str, str] = {}
        while not self._context.closed:
            self._changed.clear()
            for address in self._addresses(handle):
                before = target.here
                try:
                    await self._link(address).pull(handle, target)
                except Silent as error:
                    tried[address] = str(error)
                else:
                    return target.buffer
                if target.here > before:
                    deadline = loop.time() + self._patience_s
                elif loop.time() >= deadline:
                    break
            if loop.time() >= deadline:
                host = host_of(handle.block.place) or "?"
                why = "; ".join(tried.values()) or "no data server of it is known"
                raise Unreachable(f"host {host} is out of reach for {self._patience_s:g} s ({why})")
            await self._pause(min(_PAUSE_S, deadline - loop.time()))
        raise Unreachable("this process fetches nothing any more")

    def close(self) -> None:
        """Ends all connections; fetches under way fail. Idempotent."""
        self._book = {}
        for link in self._links.values():
            link.close()
        self._links = {}
        self._context.destroy(linger=0)
        self._changed.set()

    def _addresses(self, handle: Handle) -> list[str]:
        """Of the data servers that have a block, or a copy of it."""
        places = (host_of(handle.block.place), host_of(handle.copy))
        found = [address for place in places for address in self._book.get(place, [])]
        return [address for address in dict.fromkeys(found) if address.startswith("zmq://")]

    def _link(self, address: str) -> Link:
        link = self._links.get(address)
        if link is None or link.closed:
            link = Link(self._context, address, self._run, self._secure, self._silence_s)
            self._links[address] = link
        return link

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
