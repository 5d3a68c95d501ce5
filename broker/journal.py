"""The journal: what the broker must know again after its death, in one SQLite file.

The shell writes a batch of records before it sends what follows from them, so after a SIGKILL the journal
holds everything that anybody was told. That needs no fsync: what a process has written survives it. A power
cut may lose the last ``sync_s`` seconds; with 0 each batch waits for the disk.

SQLite is in WAL mode: a commit appends to its log; moving that into the database, and the fsync that goes
with it, happen on a thread (https://sqlite.org/wal.html).

A batch is one row, which costs a quarter of a row for each request. Rows go from the front, when no request
that began in them is open; those that stay open for long are now and then written anew at the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from broker.core.records import Batch, OfPeer, OfRequest
from broker.protocol import VERSION, Peer

log = logging.getLogger("broker")

FORMAT = 1
LARGEST_LOG = 64 << 20  #: bytes; a larger WAL is cut back, for which the broker may wait a moment
TRIM_ROWS = 256  #: written between two looks at the front
COMPACT = 16 << 20  #: bytes; if more are there, what has long been open is written anew
BUSY_S = 10.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (id INTEGER PRIMARY KEY CHECK (id = 0), value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS peers (peer BLOB PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS log (n INTEGER PRIMARY KEY, batch BLOB NOT NULL);
"""

_encode = msgspec.msgpack.Encoder().encode
_decode_peer = msgspec.msgpack.Decoder(OfPeer).decode


class Row(msgspec.Struct, array_like=True):
    """One batch: first the drops, then each request's records, a msgpack list."""

    dropped: set[int]
    requests: dict[int, msgspec.Raw]


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """Whose journal it is."""

    format: int = FORMAT
    protocol: int = VERSION
    run: str
    boot: int
    ahead: float  #: the wall clock less the shell's clock, in seconds
    host: str  #: see :func:`this_boot`
    shm_host: str = ""  #: see :func:`adapters.host.this_host`


_decode_meta = msgspec.msgpack.Decoder(Meta).decode
_decode_row = msgspec.msgpack.Decoder(Row).decode
_decode_records = msgspec.msgpack.Decoder(list[OfRequest]).decode


class Saved(msgspec.Struct):
    """What a journal holds."""

    meta: Meta
    peers: dict[Peer, OfPeer]
    records: list[tuple[int, OfRequest]]


def this_boot() -> str:
    """Names this boot of this machine and our process namespace: where it is the same, pids mean the same."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def ahead() -> float:
    """The wall clock less the shell's clock: lets times go over from one boot of a machine to the next."""
    return time.time() - time.monotonic()


class Journal:
    """One broker's journal. All but :meth:`sync` is for the loop's thread.

    Args:
        path: Of the database; made if it isn't there.
        sync_s: The longest time between two fsyncs while something is written; 0: each write has its own.
    """

    def __init__(self, path: Path, sync_s: float = 1.0) -> None:
        self.path = path
        self.sync_s = sync_s
        self._first: dict[int, int] = {}  #: open request -> the row that it begins in; oldest first
        self._next = 1
        self._front = 1  #: rows before this one are gone
        self._looked = 1  #: the next row when that was last looked at
        self._bytes = 0  #: written since everything open was recent
        self._compact_at = COMPACT
        self._dirty = False
        try:
            self._open()
            self._saved = self._load()
        except (sqlite3.DatabaseError, msgspec.MsgspecError) as error:
            bad = path.with_suffix(f".bad-{time.time_ns()}")
            text = "the journal can't be read (%s): requests in flight are lost; it is put aside as %s"
            log.error(text, str(error), bad)  # not the error itself: its frames keep the file open
            self._database.close()
            path.rename(bad)
            self._remove_logs()
            self._open()
            self._saved = None

    def _open(self) -> None:
        self._database = sqlite3.connect(
            self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        self.path.chmod(0o600)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute(f"PRAGMA synchronous={'FULL' if self.sync_s == 0 else 'NORMAL'}")
        self._database.execute(f"PRAGMA wal_autocheckpoint={1000 if self.sync_s == 0 else 0}")
        self._database.executescript(_SCHEMA)

    def _load(self) -> Saved | None:
        row = self._database.execute("SELECT value FROM meta").fetchone()
        if row is None:
            return None
        meta = _decode_meta(row[0])
        if (meta.format, meta.protocol) != (FORMAT, VERSION):
            raise sqlite3.DatabaseError(f"it is of another release (format {meta.format}.{meta.protocol})")
        peers = {
            bytes(peer): _decode_peer(record)
            for peer, record in self._database.execute("SELECT peer, record FROM peers")
        }
        rows = self._database.execute("SELECT n, batch FROM log ORDER BY n").fetchall()
        kept: dict[int, list[tuple[int, msgspec.Raw]]] = {}
        for n, blob in rows:
            row = _decode_row(blob)
            for request in row.dropped:
                kept.pop(request, None)
            for request, raw in row.requests.items():
                kept.setdefault(request, []).append((n, raw))
            self._next = n + 1
        self._first = {request: pieces[0][0] for request, pieces in kept.items()}
        self._front = rows[0][0] if rows else self._next
        self._looked = self._next
        self._bytes = sum(len(blob) for _, blob in rows)
        ordered = sorted((n, request, raw) for request, pieces in kept.items() for n, raw in pieces)
        records = [(request, record) for _, request, raw in ordered for record in _decode_records(raw)]
        return Saved(meta, peers, records)

    def take_saved(self) -> Saved | None:
        """What an earlier broker has left, once; None: nothing."""
        saved, self._saved = self._saved, None
        return saved

    def begin(self, meta: Meta) -> None:
        """This broker goes on from here."""
        self._database.execute("INSERT OR REPLACE INTO meta VALUES (0, ?)", (_encode(meta),))

    def write(self, batch: Batch) -> None:
        """Writes a batch, whole or not at all. Raises sqlite3.Error when the disk refuses it."""
        first, n = self._first, self._next
        dropped = batch.dropped & first.keys() if batch.dropped else batch.dropped
        if not (dropped or batch.requests or batch.peers):
            return
        execute = self._database.execute
        if not batch.peers:
            self._append(dropped, batch.requests)
        else:
            execute("BEGIN")
            try:
                for peer, record in batch.peers.items():
                    if record is None:
                        execute("DELETE FROM peers WHERE peer = ?", (peer,))
                    else:
                        execute("INSERT OR REPLACE INTO peers VALUES (?, ?)", (peer, _encode(record)))
                self._append(dropped, batch.requests)
                execute("COMMIT")
            except sqlite3.Error:
                with contextlib.suppress(sqlite3.Error):
                    execute("ROLLBACK")
                raise
        for request in dropped:
            del first[request]
        for request in batch.requests:
            first.setdefault(request, n)
        self._dirty = True
        if self._next - self._looked > TRIM_ROWS:
            self._trim()

    def _append(self, dropped: set[int], requests: Mapping[int, Sequence[OfRequest | msgspec.Raw]]) -> None:
        if dropped or requests:
            blob = _encode((dropped, requests))
            self._database.execute("INSERT INTO log VALUES (?, ?)", (self._next, blob))
            self._next += 1
            self._bytes += len(blob)

    def _trim(self) -> None:
        """Removes the rows in which nothing that is open began."""
        self._looked = self._next
        oldest = next(iter(self._first.values()), self._next)
        if oldest > self._front:
            self._database.execute("DELETE FROM log WHERE n < ?", (oldest,))
            self._front = oldest
        if oldest >= self._next - TRIM_ROWS:
            self._bytes = 0
        elif self._bytes > self._compact_at:
            self._compact()

    def _compact(self) -> None:
        """Writes the requests that began long ago anew, so that the next trim reaches further."""
        recent = self._next - TRIM_ROWS
        long_open = {request for request, n in self._first.items() if n < recent}
        found: dict[int, list[msgspec.Raw]] = {request: [] for request in long_open}
        for (blob,) in self._database.execute("SELECT batch FROM log ORDER BY n"):
            row = _decode_row(blob)
            for request in row.dropped & long_open:
                found[request].clear()
            for request in row.requests.keys() & long_open:
                found[request] += msgspec.msgpack.decode(row.requests[request], type=list[msgspec.Raw])
        n = self._next
        if long_open:
            self._append(long_open, found)
        self._first = {r: first for r, first in self._first.items() if r not in long_open} | dict.fromkeys(
            long_open, n
        )
        kept = sum(len(raw) for raws in found.values() for raw in raws)
        self._bytes, self._compact_at = 0, max(COMPACT, 4 * kept)

    @property
    def due(self) -> bool:
        """Whether something was written that :meth:`sync` has not seen."""
        return self._dirty and self.sync_s > 0

    def sync(self) -> None:
        """Brings what is written to the disk, and the log into the database. It blocks: for a thread."""
        self._dirty = False
        log_file = self.path.with_name(f"{self.path.name}-wal")
        large = log_file.exists() and log_file.stat().st_size > LARGEST_LOG
        with contextlib.closing(sqlite3.connect(self.path, timeout=BUSY_S)) as own:
            own.execute("PRAGMA synchronous=NORMAL")
            own.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if large else 'PASSIVE'})")

    def close(self) -> bool:
        """Ends it, and removes the file if it holds no request. Whether it did."""
        empty = not self._first
        self._database.execute("DELETE FROM peers")
        self._database.close()
        if empty:
            self.remove()
        return empty

    def remove(self) -> None:
        """Removes it: what it says is no longer true."""
        self._database.close()
        self.path.unlink(missing_ok=True)
        self._remove_logs()

    def _remove_logs(self) -> None:
        for end in ("-wal", "-shm"):
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)
