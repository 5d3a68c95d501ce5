"""Pulls blocks from other hosts into this process's memory, from whichever data server of theirs lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time

import zmq

from adapters.handle import AdapterError, Handle, Unreachable
from adapters.host import host_of
from adapters.net.buffers import KEPT_S, Buffers
from adapters.net.carried import Carried
from adapters.net.link import SILENCE_S, Link, Silent, Target
from adapters.net.movers import Puller, has_ucx
from adapters.net.secure import Secure

Book = dict[str, list[str]]  #: name of a host, or of a disk store -> addresses of its data servers

TRANSPORTS = ("auto", "zmq", "ucx")
UCX_FROM = 4 << 20  #: bytes; a smaller block is here before a ticket is
UCX_AGAIN_S = 60.0  #: a server that gave nothing over UCX is asked for pieces for so long

_log = logging.getLogger(__name__)

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
        self._buffers = Buffers()
        self._trimming: asyncio.TimerHandle | None = None
        self.carried = Carried()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._changed = asyncio.Event()
        self._puller: Puller | None = None
        self._why_none = ""  #: although it was to be started
        self._starting: asyncio.Future[None] | None = None
        self._by_pieces: dict[str, float] = {}  #: server that failed over UCX -> until when it isn't tried so

    @property
    def book(self) -> Book:
        """Who serves what, as the broker sent it."""
        return self._book

    @book.setter
    def book(self, book: Book) -> None:
        self._book = book
        known = {address.rpartition("/")[2] for addresses in book.values() for address in addresses}
        for address in [address for address in self._links if address not in known]:
            self._links.pop(address).close("it has left")
        self._changed.set()

    async def fetch(self, handle: Handle, transport: str = "auto") -> memoryview:
        """The block's bytes, in a writable buffer of ``handle.nbytes`` bytes that is nobody else's.

        Raises :class:`BadHandle` when the block's host says that it is gone, :class:`Unreachable` when
        nothing of it has come from that host for ``patience_s``, and AdapterError for a transport that
        doesn't lead there.

        Args:
            handle: Of another host's block.
            transport: "zmq"; "ucx", by which all goes that lies in memory; or "auto": UCX for what is large,
                where both hosts have it, and where it has not failed of late.
        """
        if transport not in TRANSPORTS:
            raise AdapterError(f"transport {transport!r} leads to no other host; allowed: {TRANSPORTS}")
        loop = asyncio.get_running_loop()
        self._trim_later()
        target: Target | None = None
        deadline = loop.time() + self._patience_s
        tried: dict[str, str] = {}
        while not self._context.closed:
            self._changed.clear()
            for address in self._servers(handle, "zmq"):
                before = 0 if target is None else target.here
                try:
                    if self._goes_by_ucx(address, handle, transport) and await self._has_puller(transport):
                        data = await self._by_ucx(address, handle)
                        if data is not None:
                            self.carried.add("ucx", _host(address), handle.nbytes)
                            return data
                    target = target or Target(self._buffers.take(handle.nbytes))
                    await self._link(address).pull(handle, target)
                except Silent as error:
                    tried[address] = str(error)
                else:
                    self.carried.add("zmq", _host(address), handle.nbytes)
                    return target.buffer
                if target is not None and target.here > before:
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
        if self._puller is not None:
            self._puller.close()
        if self._trimming is not None:
            self._trimming.cancel()
        self._buffers.trim(0)
        self.carried.sum_up()

    def _servers(self, handle: Handle, scheme: str) -> list[str]:
        """IP:PORT of the data servers that have a block, or a copy of it, and can be asked so."""
        places = (host_of(handle.block.place), host_of(handle.copy))
        found = [address.split("://") for place in places for address in self._book.get(place, [])]
        return list(dict.fromkeys(address for kind, address in found if kind == scheme))

    def _link(self, address: str) -> Link:
        link = self._links.get(address)
        if link is None or link.closed:
            link = Link(self._context, address, self._run, self._secure, self._silence_s)
            self._links[address] = link
        return link

    # --- UCX

    def _goes_by_ucx(self, address: str, handle: Handle, transport: str) -> bool:
        """Raises AdapterError where it must and can't."""
        offered = self._servers(handle, "ucx")
        if transport == "ucx":
            if not has_ucx():
                raise AdapterError("transport 'ucx' needs UCXX here: pip install 'omni-broker[ucx]'")
            if not offered:
                host = host_of(handle.block.place)
                raise AdapterError(f"transport 'ucx' needs UCXX on host {host}, which offers none")
            return address in offered and handle.nbytes > 0
        return (
            transport == "auto"
            and address in offered
            and handle.nbytes >= UCX_FROM
            and time.monotonic() >= self._by_pieces.get(address, 0)
            and has_ucx()
        )

    async def _by_ucx(self, address: str, handle: Handle) -> memoryview | None:
        """The block's bytes; None where it has to come in pieces. Raises as :meth:`Link.pull` does."""
        link = self._link(address)
        assert self._puller is not None
        try:
            ticket = await link.ticket(handle)
        except Silent:
            if link.closed:
                raise
            return None  # it lies on disk, or UCX is not ready there
        data = self._buffers.take(handle.nbytes)
        try:
            await self._puller.pull(_host(address), ticket, data)
        except Silent as error:
            self._by_pieces[address] = time.monotonic() + UCX_AGAIN_S
            raise Silent(f"{address}: {error}") from None
        return data

    async def _has_puller(self, transport: str) -> bool:
        """Whether UCX could be started here. Raises AdapterError where it must and couldn't."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().run_in_executor(None, self._start)
        await asyncio.shield(self._starting)
        if self._puller is None and transport == "ucx":
            raise AdapterError(f"transport 'ucx': {self._why_none}")
        return self._puller is not None

    def _start(self) -> None:
        """Beside the loop: UCX's libraries take a second to load."""
        from adapters.net.ucx import UcxPuller

        try:
            self._puller = UcxPuller(self._silence_s)
            if self._context.closed:  # meanwhile
                self._puller.close()
        except Exception as error:  # ImportError too: this host may lack what it needs
            self._why_none = str(error)
            _log.warning("no blocks come by UCX: %s", error)

    def _trim_later(self) -> None:
        if self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(KEPT_S, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        self._buffers.trim()
        if self._buffers.lent or self._buffers.free_bytes:
            self._trim_later()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()


def _host(address: str) -> str:
    """The IP address in ``IP:PORT``."""
    return address.rpartition(":")[0].strip("[]")
