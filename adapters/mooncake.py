"""Tensors in Mooncake's distributed memory: what must outlive a host, and what any host may read.

    store = MooncakeStore(Address("10.0.0.2:50051"))
    place = store.put("speech-7f3a90c2", data)      # "speech-7f3a90c2/mc<30 hex digits>", on two hosts
    data = store.read(place, len(data))             # on any host, checked

The memory is given by processes of Mooncake's own (``mooncake_client``), one on each host, never by those
that put: an object is lost with the process that gave its memory. Each tensor lies on several hosts, as far
as there are as many, and is pinned: Mooncake is a cache, and would throw away what it takes for unused.

When a host dies, what lies on it too is out of reach until Mooncake's master has noticed (``--client_ttl``);
reads and writes are tried again until then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import struct
import time
from typing import Any

from adapters.handle import AdapterError, ArenaFull, BadHandle, Unreachable
from adapters.mooncake_broom import Broom
from adapters.mooncake_client import FULL, GONE, OK, Address, Connection, Failed, in_words
from adapters.store import NAME, Beside, check_name, checksum

log = logging.getLogger("mooncake")

PLACE = re.compile(rf"{NAME.pattern}/mc[0-9a-f]{{30}}")
VERSION = 1
FULL_S = 5.0  #: room is waited for so long
LARGEST_SWEEP = 4000  #: names in one pattern, which the master has to compile

_HEADER = struct.Struct("<8sIQ16s")  #: magic, version, bytes of the tensor, their checksum
_MAGIC = b"omnimoon"
_PAUSE_S = 0.25
_LOOK_S = 10.0  #: how often it is looked up whether tensors lie on as many hosts as they should
_BLIND_S = 5.0  #: a master that did not answer is not asked again for so long whether something is there


class MooncakeStore(Beside):
    """One process's view of a Mooncake. Connects when it is first used."""

    transport = "mooncake"

    def __init__(self, address: Address, *, patience_s: float | None = None, full_s: float = FULL_S) -> None:
        """Connects to nobody yet.

        Args:
            address: Whose memory.
            patience_s: What can't be written or read is tried again for so long; by default ``OMNI_FETCH_S``,
                else 20 s, like blocks of other hosts.
            full_s: Room is waited for so long.
        """
        super().__init__()
        self.address = address
        self.text = str(address)
        self.connection = Connection(address)
        self._patience_s = float(os.environ.get("OMNI_FETCH_S") or 20) if patience_s is None else patience_s
        self._full_s = full_s
        self._broom = Broom(self.connection)
        self._looked = -_LOOK_S
        self._blind_until = 0.0

    def put(self, name: str, data: memoryview) -> str:
        """See :meth:`adapters.store.Store.put`. ArenaFull when no host has room for ``full_s``."""
        check_name(name)
        header = _HEADER.pack(_MAGIC, VERSION, len(data), checksum(data))
        began = time.monotonic()
        while True:
            # A name of its own for each try: what an earlier one has left would be taken for a success.
            place = f"{name}/mc{secrets.token_hex(15)}"
            failure: AdapterError
            try:
                code = self.connection.put(self._key(place), [header, data], self._full_s)
            except Unreachable as error:
                failure = error
            else:
                if code == OK:
                    self._look(place)
                    return place
                failure = _failed(code, f"{len(data):,} bytes can't be put into Mooncake")
            limit = self._full_s if isinstance(failure, ArenaFull) else self._patience_s
            if not failure.retryable or time.monotonic() - began > limit:
                raise failure
            time.sleep(_PAUSE_S)

    def read(self, place: str, nbytes: int) -> bytes:
        """See :meth:`adapters.store.Store.read`."""
        if not PLACE.fullmatch(place):
            raise BadHandle(f"{place[:80]!r} is no place in Mooncake")
        size = _HEADER.size + nbytes
        began = time.monotonic()
        while True:
            failure: AdapterError
            try:
                code, data = self.connection.get(self._key(place), size, self._patience_s)
            except Unreachable as error:
                failure = error
            else:
                if code >= 0:
                    return _checked(place, data, nbytes)
                failure = _failed(code, f"{place} can't be read from Mooncake")
                if isinstance(failure, Failed):  # our parameters are right, so what lies there is too large
                    failure = BadHandle(str(failure))
            if not failure.retryable or time.monotonic() - began > self._patience_s:
                raise failure
            time.sleep(_PAUSE_S)

    def has(self, place: str) -> bool:
        """See :meth:`adapters.store.Store.has`. True also where the master does not answer."""
        if not PLACE.fullmatch(place):
            return False
        if time.monotonic() < self._blind_until:
            return True
        code = -1
        with contextlib.suppress(AdapterError):
            code = self.connection.call(lambda store: int(store.is_exist(self._key(place))))
        if code < 0:
            self._blind_until = time.monotonic() + _BLIND_S
        return code != 0

    def unlink(self, place: str) -> bool:
        """Removes one tensor, soon. False: that is no place in Mooncake."""
        if not PLACE.fullmatch(place):
            return False
        self._broom.remove(self._key(place))
        return True

    def discard(self, name: str) -> None:
        """Removes all of a request, soon. Raises ValueError for a bad name."""
        self._broom.remove_matching(f"^{self._key(check_name(name))}/")

    def sweep(self, keep: set[str]) -> list[str]:
        """Removes all requests but these, now. Which ones went, only Mooncake knows: returns no names."""
        names = sorted(map(check_name, keep))
        if len(names) > LARGEST_SWEEP:
            log.warning("%d requests are open: what others have left in Mooncake stays", len(names))
            return []
        pattern = f"^{self._key('')}" + (f"(?!({'|'.join(names)})/)" if names else "")
        try:
            code = self.connection.call(lambda store: int(store.remove_by_regex(pattern, True)))
        except AdapterError as error:
            log.warning("what earlier requests have left in Mooncake stays: %s", error)
        else:
            if code < 0:
                log.warning("what earlier requests have left in Mooncake stays: %s", in_words(code))
        return []

    def close(self) -> None:
        """Nothing of an empty store is left to remove."""
        self.leave()

    def leave(self) -> None:
        """Lets what is to be removed go, for a second or two, and ends the connection."""
        self._broom.close()
        self.connection.close()

    def _key(self, place: str) -> str:
        return f"{self.address.space}/{place}"

    def _look(self, place: str) -> None:
        """Says so when tensors lie on fewer hosts than they should; only now and then, as it costs a call."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        with contextlib.suppress(AdapterError):
            hosts = self.connection.call(lambda store: _hosts(store.get_replica_desc(self._key(place))))
            if len(hosts) < self.address.replicas:
                log.warning(
                    "what is put into Mooncake lies on %d of %d hosts, and is lost with them: start more "
                    "`mooncake_client`, one on each host",
                    len(hosts),
                    self.address.replicas,
                )


def _hosts(replicas: list[Any]) -> set[str]:
    """Whose memory holds an object, by address."""
    ends = [replica.get_memory_descriptor().buffer_descriptor.transport_endpoint for replica in replicas]
    return {end.rpartition(":")[0] for end in ends}


def _failed(code: int, what: str) -> AdapterError:
    if code in GONE:
        return BadHandle(f"{what}: {in_words(code)}")
    if code == FULL:
        return ArenaFull(f"{what}: {in_words(code)}; give it more (`mooncake_client --global_segment_size`)")
    if code in (-600, -400):
        return Failed(f"{what}: {in_words(code)}")
    return Unreachable(f"{what}: {in_words(code)}")


def _checked(place: str, data: bytes, nbytes: int) -> bytes:
    try:
        magic, version, length, written = _HEADER.unpack_from(data)
    except struct.error:
        raise BadHandle(f"{place} is too short to be a tensor of ours") from None
    if (magic, length, len(data)) != (_MAGIC, nbytes, _HEADER.size + nbytes):
        raise BadHandle(f"{place} holds {len(data) - _HEADER.size:,} bytes where {nbytes:,} were put")
    if version != VERSION:
        raise BadHandle(f"{place} was put by another version of omni-broker")
    tensor = data[_HEADER.size :]
    if checksum(tensor) != written:
        raise BadHandle(f"{place} is damaged: its checksum differs")
    return tensor
