"""This process's connection to Mooncake: addresses, codes in words, and limits for calls that know none.

Mooncake's calls return integers. Its own limits are too long for us: a call that meets a host whose cable
was pulled comes back after a minute. So each runs on a thread of its own, and is left alone when its time is
over; it keeps its part of the transfer buffer until it comes back.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self, TypeVar
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec

from adapters.handle import AdapterError, ArenaFull, Unreachable

T = TypeVar("T")

OK = 0
FULL = -200
GONE = (-704, -710, -712)
LATER = (-103, -703, -706, -708, -714, -900, -901, -1010)  #: what may be otherwise in a moment
#: What the calls return, see Mooncake's mooncake-store/include/types.h.
CODES = {
    -1: "internal error",
    -10: "buffer overflow",
    -101: "its memory segment is unknown",
    -102: "its memory segment is there already",
    -103: "the master does not know this client (any more)",
    FULL: "no room in the memory of all hosts together",
    -400: "invalid key",
    -500: "write failed",
    -600: "invalid parameters",
    -601: "not this client's object",
    -700: "invalid write",
    -701: "invalid read",
    -702: "invalid replica",
    -703: "no replica is complete",
    -704: "there is no such object",
    -705: "the object is there already",
    -706: "the object is being read",
    -707: "the transfer took longer than the object's lease",
    -708: "the object is being copied",
    -710: "there is no such replica",
    -711: "the replica is there already",
    -712: "its replica is gone",
    -714: "the object is being written or copied",
    -800: "the transfer failed: a host that holds a replica does not answer",
    -801: "checksums differ",
    -900: "the master does not answer",
    -901: "the master did not answer in time",
    -1010: "not possible in the master's state",
    -1011: "not possible in the master's mode",
}

CALL_S = 5.0  #: a call that moves nothing gets so long
SLOWEST = 20e6  #: bytes per second that a transfer may be slow
PROBE_S = 3.0
REFUSED_S = 10.0  #: a master that has refused us is left alone for so long
CLOSE_S = 1.0  #: calls under way get so long at the end
DEFAULT_BUFFER_MIB = 64
DEFAULT_REPLICAS = 2
CURE = (
    "start one (`mooncake_master --rpc_port PORT`, and a `mooncake_client` on each host that gives memory), "
    "or name it with --mooncake-master HOST:PORT; see docs/mooncake.md"
)
MISSING = (
    "Mooncake can't be imported ({}); install omni-broker's extra: pip install 'omni-broker[mooncake]', and "
    "what it needs of the system: apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4"
)

#: For Mooncake's library, which reads them when it is loaded. To log and to try again is ours to do.
_SETTINGS = {"MC_LOG_LEVEL": "ERROR", "MC_STORE_CLIENT_METRIC": "0", "MC_STORE_CLIENT_SETUP_RETRIES": "1"}


_SPACE = re.compile(r"[0-9A-Za-z_-]{1,64}")


class Failed(AdapterError):
    """A call said no, with a code that is none of the usual ones."""


class Address(msgspec.Struct, frozen=True):
    """A Mooncake to be used, as one line of text: ``mooncake://HOST:PORT?space=...``."""

    master: str  #: HOST:PORT
    space: str = "omni"  #: what our keys begin with, so that several brokers may share a Mooncake
    metadata: str = "P2PHANDSHAKE"  #: where its transfer engines find each other
    buffer_mib: int = DEFAULT_BUFFER_MIB  #: memory of each process for what comes and goes
    replicas: int = DEFAULT_REPLICAS  #: hosts that hold each tensor, as far as there are so many

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads what ``str`` writes. Raises ValueError naming what is wrong."""
        parts = urlsplit(text)
        fields: dict[str, Any] = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        for key in ("buffer_mib", "replicas"):
            if key in fields:
                fields[key] = int(fields[key])
        address = msgspec.convert({"master": parts.netloc, **fields}, cls)
        address.host_and_port()
        if not _SPACE.fullmatch(address.space):
            raise ValueError(f"{address.space!r} is no name of a space: letters, digits, _ and -")
        if address.buffer_mib < 1 or address.replicas < 1:
            raise ValueError(f"{text!r} asks for no buffer or no replicas")
        return address

    def __str__(self) -> str:
        fields = msgspec.structs.asdict(self)
        return f"mooncake://{fields.pop('master')}?{urlencode(fields)}"

    def host_and_port(self) -> tuple[str, int]:
        """The master's. Raises ValueError."""
        host, colon, port = self.master.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{self.master!r} is no address of a Mooncake master: HOST:PORT")
        return host.strip("[]"), int(port)


def adapted(text: str, **fields: Any) -> str:
    """An address with other values in these fields. Raises ValueError for one that is none of Mooncake's."""
    if not text.startswith("mooncake://"):
        raise ValueError("this broker keeps nothing in Mooncake; start it with --store mooncake")
    address = Address.parse(text)
    return str(Address.parse(str(msgspec.structs.replace(address, **fields))))


def in_words(code: int) -> str:
    """What a call's result means."""
    return f"{CODES.get(code, 'unknown error')} (Mooncake's code {code})"


def probe(address: Address) -> str:
    """Asks whether a master is there. Returns our own address on the way to it. Raises Unreachable."""
    try:
        with socket.create_connection(address.host_and_port(), PROBE_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        why = error.strerror or str(error)
        raise Unreachable(f"no Mooncake master answers at {address.master} ({why}): {CURE}") from None


def library() -> Any:
    """Mooncake's module. Raises AdapterError with the cure where it isn't there."""
    for key, value in _SETTINGS.items():
        os.environ.setdefault(key, value)
    try:
        import mooncake.store
    except ImportError as error:
        raise AdapterError(MISSING.format(error)) from None
    return mooncake.store


class Connection:
    """Connects at the first call. Thread-safe; everything blocks, but no longer than its limit."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._store: Any = None
        self._pool: Any = None
        self._config: Any = None
        self._running: set[Future[Any]] = set()  #: calls that have not come back
        self._not_before = 0.0  #: when a master that has refused us may be asked again
        self._pid = os.getpid()

    def connect(self) -> Any:
        """Mooncake's store, connected. Raises Unreachable, or AdapterError where the library isn't there."""
        with self._lock:
            if self._pid != os.getpid():
                raise AdapterError("a connection to Mooncake can't be used after a fork")
            if self._store is None:
                self._open()
            return self._store

    def _open(self) -> None:
        module = library()
        if time.monotonic() < self._not_before:
            raise Unreachable(f"the Mooncake master at {self.address.master} has just refused us")
        ours = probe(self.address)
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", ours)
        store = module.MooncakeDistributedStore()
        setup = {
            "local_hostname": ours,
            "metadata_server": self.address.metadata,
            "global_segment_size": 0,  # other processes give memory: what we put must outlive us
            "local_buffer_size": self.address.buffer_mib << 20,
            "protocol": "tcp",
            "master_server_addr": self.address.master,
        }
        code = self._within(CALL_S * 2, lambda: store.setup(setup), lambda late: store.close())
        if code != OK:
            # Setting up holds Python's global lock, for seconds where a master is there but frozen.
            self._not_before = time.monotonic() + REFUSED_S
            raise Unreachable(f"the Mooncake master at {self.address.master} refuses us: {in_words(code)}")
        self._pool = module.BufferPool(store, max_bytes=self.address.buffer_mib << 20, alignment=64)
        self._config = module.ReplicateConfig()
        self._config.replica_num = self.address.replicas
        self._config.with_hard_pin = True  # else it would be thrown away when memory is short
        self._store = store

    def put(self, key: str, parts: list[bytes | memoryview], timeout_s: float) -> int:
        """Puts the parts, one behind the other, under a key that was never used. Returns the code.

        Raises Unreachable when the call does not come back, and ArenaFull when there is no room in the
        transfer buffer for ``timeout_s``; after that, too, nothing will lie under the key.
        """
        store = self.connect()
        size = sum(map(len, parts))
        lease = self._lease(size, timeout_s)
        try:
            _fill(lease, parts)
        except BaseException:
            lease.release()
            raise
        return self._transfer(
            lease,
            lambda: int(store.put_from(key, lease.ptr, size, self._config)),
            lambda late: store.remove(key, True),
        )

    def get(self, key: str, size: int, timeout_s: float) -> tuple[int, bytes]:
        """The bytes under a key, at most so many: (their number, or a code; the bytes). Raises like `put`."""
        store = self.connect()
        lease = self._lease(size, timeout_s)

        def work() -> tuple[int, bytes]:
            code = store.get_into(key, lease.ptr, size)
            if code < 0:
                return code, b""
            with lease.buffer as view, view[:code] as part:
                return code, bytes(part)

        return self._transfer(lease, work, lambda late: None)

    def call(self, work: Callable[[Any], T]) -> T:
        """Something short: ``work`` gets Mooncake's store. Raises Unreachable when it does not come back."""
        store = self.connect()
        return self._within(CALL_S, lambda: work(store), lambda late: None)

    def close(self) -> None:
        """Ends the connection, unless a call that was left alone still uses it. Idempotent."""
        with self._lock:
            store, self._store = self._store, None
        if store is None:
            return
        deadline = time.monotonic() + CLOSE_S
        while self._running:
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
        with contextlib.suppress(RuntimeError):
            self._pool.close()
        store.close()

    # --- the transfer buffer

    def _lease(self, size: int, timeout_s: float) -> Any:
        try:
            return self._pool.acquire(size, timeout=max(timeout_s, 0.001))
        except RuntimeError as error:
            room = f"the transfer buffer of {self.address.buffer_mib} MiB"
            if size > self.address.buffer_mib << 20:
                full = ArenaFull(
                    f"a tensor of {size:,} bytes exceeds {room}; see --mooncake-transfer-buffer-size"
                )
                full.retryable = False
                raise full from None
            raise ArenaFull(f"no {size:,} bytes were free in {room} for {timeout_s:g} s ({error})") from None

    def _transfer(self, lease: Any, work: Callable[[], T], late: Callable[[T], object]) -> T:
        def then_release() -> T:
            try:
                return work()
            finally:
                lease.release()

        return self._within(CALL_S + lease.size / SLOWEST, then_release, late)

    def _within(self, limit_s: float, work: Callable[[], T], late: Callable[[T], object]) -> T:
        """Runs ``work`` on a thread of its own. One that is given up tells its result to ``late``."""
        future: Future[T] = Future()
        deciding = threading.Lock()
        given_up = False

        def run() -> None:
            try:
                result = work()
                with deciding:
                    if not given_up:
                        future.set_result(result)
                if given_up:
                    late(result)
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
            finally:
                self._running.discard(future)

        self._running.add(future)
        threading.Thread(target=run, daemon=True, name="mooncake").start()
        try:
            return future.result(limit_s)
        except TimeoutError:
            with deciding:
                if future.done():
                    return future.result()
                given_up = True
        raise Unreachable(f"Mooncake at {self.address.master} did not answer for {limit_s:.0f} s")


def _fill(lease: Any, parts: list[bytes | memoryview]) -> None:
    with lease.buffer as view:
        start = 0
        for part in parts:
            view[start : start + len(part)] = part
            start += len(part)
