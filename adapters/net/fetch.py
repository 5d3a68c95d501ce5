"""Pulls blocks from other hosts into this process's memory, from whichever data server of theirs lives."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import zmq

from adapters.handle import AdapterError, Handle
from adapters.host import host_of
from adapters.net.link import Link, Silent
from adapters.net.secure import Secure

Book = dict[str, list[str]]  #: name of a host, or of a disk store -> addresses of its data servers

_PAUSE_S = 0.25  #: before the addresses that were of no use are tried again


class Unreachable(AdapterError):
    """No data server of a block's host answered in time."""

    retryable = True


def patience_s() -> float:
    """Seconds that a host may be silent: ``OMNI_FETCH_S``, else 20."""
    return float(os.environ.get("OMNI_FETCH_S") or 20)


class Fetcher:
    """Pulls blocks from other hosts. To be used on one event loop only.

    Args:
        run: The broker run's nonce.
        secure: The keys; None only for data servers on loopback.
        patience_s: See :func:`patience_s`.
    """

    def __init__(self, run: str, *, secure: Secure | None, patience_s: float | None = None) -> None:
        self._run = run
        self._secure = secure
        self._patience_s = patience_s
        self._book: Book = {}
        self._links: dict[str, Link] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._changed = asyncio.Event()

    @property
    def book(self) -> Book:
        """Host -> addresses of its data servers, as the broker sent it."""
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

        Raises :class:`BadHandle` when the block's host says that it is gone, :class:`Unreachable` when no
        data server of that host has answered for ``patience_s``, and AdapterError for a transport that can't
        do it.
        """
        if transport not in ("auto", "zmq"):
            raise AdapterError(f"transport {transport!r} does not reach other hosts here")
        host = host_of(handle.block.place)
        buffer = memoryview(np.empty(handle.nbytes, np.uint8))
        patience = patience_s() if self._patience_s is None else self._patience_s
        deadline = asyncio.get_running_loop().time() + patience
        tried: dict[str, str] = {}
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    self._changed.clear()
                    for address in self._addresses(host, host_of(handle.copy)):
                        try:
                            await self._link(address).pull(handle, buffer)
                        except Silent as error:
                            tried[address] = str(error)
                        else:
                            return buffer
                    await self._pause()
        except TimeoutError:
            why = "; ".join(tried.values()) or "no data server of it is known"
            raise Unreachable(f"host {host} was out of reach for {patience:g} s ({why})") from None

    def close(self) -> None:
        """Ends all connections. Idempotent. Fetches under way must have been cancelled."""
        for link in self._links.values():
            link.close()
        self._links = {}
        self._context.destroy(linger=0)

    def _addresses(self, *places: str) -> list[str]:
        """Of the data servers that have a block, or a copy of it."""
        found = [address for place in places for address in self._book.get(place, [])]
        return [address for address in dict.fromkeys(found) if address.startswith("zmq://")]

    def _link(self, address: str) -> Link:
        link = self._links.get(address)
        if link is None or link.closed:
            link = self._links[address] = Link(self._context, address, self._run, self._secure)
        return link

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(_PAUSE_S):
                await self._changed.wait()
        except TimeoutError:
            pass
