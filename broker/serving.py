"""A process that gives other hosts what lies on its own: a guardian, a gateway, a client that lends tensors.

Only where a run spans hosts; on one host nobody opens anything.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from adapters.disk import DiskStore
from adapters.host import this_host
from adapters.segment import shm_dir
from adapters.store import Store
from broker.address import AddressError, is_loopback, make_state_dir, state_dir

if TYPE_CHECKING:
    from adapters.net.server import DataServer
    from adapters.reader import Reader

VARIABLE = "OMNI_DATA_HOST"


def data_address(endpoint: str, chosen: str | None = None) -> str | None:
    """The IP address at which this process shall serve its host's memory; None: nobody asks for it.

    Args:
        endpoint: Of the broker. Beyond loopback, others may be beyond it too.
        chosen: A host's name or address, for example from ``--data-host``; by default ``OMNI_DATA_HOST``,
            else the address by which the broker is reached.

    Raises AddressError for a host that is none, or no single one.
    """
    chosen = chosen or os.environ.get(VARIABLE)
    try:
        if chosen:
            address = str(socket.getaddrinfo(chosen, None, type=socket.SOCK_STREAM)[0][4][0])
            if address in ("0.0.0.0", "::"):
                raise AddressError(
                    f"{chosen} is no address that others could ask at; name one of this machine's with "
                    f"--data-host or {VARIABLE}"
                )
            return address
        parts = urlsplit(endpoint)
        if parts.scheme != "tcp" or is_loopback(parts.hostname or ""):
            return None
        family, kind, _, _, peer = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # nothing is sent
            probe.connect(peer)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise AddressError(
            f"{chosen or endpoint}: {error.strerror}; name an address of this machine with --data-host or "
            f"{VARIABLE}"
        ) from None


def own_address() -> str:
    """The address by which this machine reaches others. Raises AddressError where it reaches none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            raise AddressError(
                f"name this machine's address for other machines with --data-host or {VARIABLE}"
            ) from None
        return str(probe.getsockname()[0])


def store_here(store: str, broker_host: str, run: str) -> str:
    """The store for this process, as :func:`adapters.store.open_store` takes it; "": there is none.

    A folder of the broker's is out of reach on another host, which has one of its own for each run: so the
    runs of two brokers, whose workers share a host, keep out of each other's way.

    Args:
        store: What the broker has said.
        broker_host: Its shared memory's, see :func:`adapters.host.this_host`; "": as ours.
        run: The run's nonce.

    Raises AddressError where our state folder can't be used.
    """
    if not store or "://" in store or broker_host in ("", this_host(shm_dir())):
        return store
    return str(make_state_dir(state_dir()) / f"chunks-{run}")


class Serving:
    """The data server of this process, while there is one.

    Args:
        address: Where, see :func:`data_address`; None: nowhere.
    """

    def __init__(self, address: str | None) -> None:
        self.address = address
        self.host = this_host(shm_dir())
        self.store_host = ""  #: the name of the store that is served too
        self._server: DataServer | None = None
        self._reader: Reader | None = None
        self._store: DiskStore | None = None
        self._run = ""

    @property
    def data(self) -> list[str]:
        """The server's addresses, for the broker; [] without one."""
        return self._server.addresses if self._server is not None else []

    def begin(self, run: str, store: Store | None) -> None:
        """Serves this run, if it does not already, and no other. Without an address nothing happens.

        Raises AdapterError where it can't listen, KeysError for keys that are missing beyond loopback, or
        can't be used.
        """
        if self.address is None or self._run == run:
            return
        from adapters.net.server import DataServer  # not at the head: it brings NumPy, and most need none
        from adapters.reader import Reader
        from broker.keys import MAKE, KeysError, Shared

        self.close()
        secure = Shared.find()
        if secure is None and not is_loopback(self.address):
            raise KeysError(f"tensors are sent to other machines with keys only; {MAKE}")
        if isinstance(store, DiskStore):  # others are read by everybody as they are
            self._store = store
            self.store_host = store.name()
        self._reader = Reader(shm_dir(), store=self._store)
        self._server = DataServer(run, self.address, self._reader, secure=secure)
        self._run = run

    def look(self) -> None:
        """Due now and then: lets go of memory that was removed, and learns a store's new name.

        It has one where it was empty, and was removed and made again.
        """
        if self._reader is not None:
            self._reader.trim()
        if self._store is not None and self._store.folder.is_dir():
            with contextlib.suppress(OSError, ValueError):
                self.store_host = self._store.name()

    def close(self) -> None:
        """Ends it. Idempotent."""
        if self._server is not None:
            self._server.close()
        self._server, self._reader, self._store = None, None, None
        self._run = self.store_host = ""
