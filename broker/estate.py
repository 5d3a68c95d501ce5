"""What a broker has on its machine: its run's memory, a journal, a store; and the core made of them."""

from __future__ import annotations

import contextlib
import logging
import secrets
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from adapters.disk import DiskStore
from adapters.handle import Handle
from adapters.host import host_of, this_host
from adapters.room import ceiling
from adapters.segment import shm_dir
from adapters.sweep import Keep, RunLock, sweep, sweep_run, unlink_owner
from broker.core.events import Discard, Gone, Reap, SweepRun
from broker.core.machine import Core, Settings
from broker.core.records import ClientMet, GuardianMet, OfPeer, WorkerMet
from broker.core.requests import Settings as RequestSettings
from broker.core.restore import restore
from broker.journal import Journal, Meta, Saved, ahead, this_boot
from broker.protocol import Peer
from broker.storing import forget, open_for_broker
from pipelines.graph import Pipeline

log = logging.getLogger("broker")

ROOM = 8  #: tensors under way may take as many arenas' ceilings before nothing more is accepted


class Estate:
    """Opened once per broker process.

    Args:
        pipelines: What is served.
        state: The state folder, made already; None: no journal and no disk store, nothing outlives us.
        sync_s: See :class:`broker.journal.Journal`.
        store: A Mooncake's address; "": the disk store of the state folder.
    """

    def __init__(
        self, pipelines: list[Pipeline], state: Path | None, sync_s: float = 1.0, store: str = ""
    ) -> None:
        self._journal = Journal(state / "journal.db", sync_s) if state is not None else None
        self._state = state
        self._store = open_for_broker(store, state)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="estate")
        saved = self._journal.take_saved() if self._journal is not None else None
        self.run = saved.meta.run if saved is not None else secrets.token_hex(8)
        self._lock = RunLock(self.run)
        self._keep = Keep(self.run, self._journal.path) if self._journal is not None else None
        for swept in sweep():
            log.info("removed %s (%d bytes), left by a dead run", swept.name, swept.bytes)
        # Peers tell by it that we are another process than the one they knew, also where nothing was saved.
        here = this_host(shm_dir())
        boot = saved.meta.boot + 1 if saved is not None else secrets.randbits(40) + 1
        self.core = Core(
            pipelines,
            run=self.run,
            entropy=secrets.randbits(64),
            first_request=time.time_ns() // 1_000_000 << 12,  # numbers of an earlier run never come back
            boot=boot,
            store=self._store.text if self._store is not None else "",
            host=here,
            journal=self._journal is not None,
            settings=Settings(requests=RequestSettings(block_bytes=ROOM * ceiling())),
        )
        self.gone: list[Gone] = []  #: the core's first events
        self._ours = {"", here}  #: names of this host, see :mod:`adapters.host`
        self._stores: set[str] = set()  #: disk stores of other hosts
        if self._journal is not None:
            meta = Meta(run=self.run, boot=boot, ahead=ahead(), host=this_boot(), shm_host=here)
            try:
                self._journal.begin(meta)
            except sqlite3.Error as error:
                self._give_up_journal(error)
            if saved is not None:  # what else is in memory and on disk goes when its peers have reported
                self._ours.add(saved.meta.shm_host)  # it has another name since a reboot
                self._restore(saved, same_boot=saved.meta.host == meta.host)

    def _restore(self, saved: Saved, *, same_boot: bool) -> None:
        """Goes on where the broker before us was. After a reboot nobody here who knew it is left."""
        now = time.monotonic()
        elsewhere = _elsewhere(saved.peers, self._ours)
        self._stores = {met.store_host for met in elsewhere.values() if isinstance(met, GuardianMet)} - {""}
        peers = saved.peers if same_boot else elsewhere
        shift = saved.meta.ahead - ahead()
        restore(self.core, peers, saved.records, now, shift=shift, lost=self._is_lost)
        core = self.core
        pids = {peer: guardian.pid for peer, guardian in core.guardians.items()}
        pids |= {peer: worker.pid for peer, worker in core.workers.items()}
        local = pids.keys() - elsewhere.keys()
        self.gone = [Gone(now, peer) for peer, pid in pids.items() if peer in local and not _exists(pid)]
        requests = core.board.requests
        if requests or peers:
            text = "going on where an earlier broker ended: %d requests, %d peers, %d of them gone"
            log.info(text, len(requests), len(peers), len(self.gone))

    def _is_lost(self, handle: Handle) -> bool:
        """What lies on another host nobody here can know, so it is not lost before somebody asks for it."""
        if handle.transport == "shm":
            if host_of(handle.block.place) not in self._ours or (shm_dir() / handle.block.place).exists():
                return False
        elif self._is_elsewhere(handle.file):
            return False
        return self._store is None or not handle.file or not self._store.has(handle.file)

    def _is_elsewhere(self, file: str) -> bool:
        """Whether a file is in another host's disk store. One that calls itself ours can be asked."""
        name = host_of(file)
        if name and isinstance(self._store, DiskStore) and self._store.folder.is_dir():
            return name != self._store.name()
        return name in self._stores

    # --- while it runs

    def commit(self) -> None:
        """Writes what the core has decided. To be called before anybody hears of it."""
        batch = self.core.take_records()
        if not batch or self._journal is None:
            return
        try:
            self._journal.write(batch)
        except sqlite3.Error as error:
            self._give_up_journal(error)

    def _give_up_journal(self, error: sqlite3.Error) -> None:
        """A journal that is behind would mislead the next broker."""
        assert self._journal is not None
        log.error(
            "the journal %s can't be written (%s): from now on requests in flight do not survive the "
            "broker's death; make room and restart it",
            self._journal.path,
            error,
        )
        with contextlib.suppress(OSError):
            self._journal.remove()
        self._journal = None
        self.core.board.log.enabled = False

    def sync(self) -> None:
        """Has a thread bring the journal to the disk, if something was written; about every ``sync_s``."""
        if self._journal is not None and self._journal.due:
            self._thread.submit(_logged, self._journal.sync)

    @property
    def sync_s(self) -> float:
        """How often :meth:`sync` is due; 0: never."""
        return self._journal.sync_s if self._journal is not None else 0.0

    def carry_out(self, instruction: Reap | Discard | SweepRun) -> None:
        """Removes memory and files that nobody needs."""
        if isinstance(instruction, Reap):
            unlink_owner(instruction.arena)
        elif isinstance(instruction, SweepRun):
            for swept in sweep_run(self.run, set(instruction.arenas)):
                log.info("removed %s (%d bytes), whose owner is gone", swept.name, swept.bytes)
            if self._store is not None:
                self._thread.submit(_logged, self._store.sweep, set(self.core.board.names))
        elif self._store is not None:
            self._thread.submit(_logged, self._store.discard, instruction.name)

    def close(self) -> None:
        """A clean end: what is open is finished by the next broker here; without any nothing is left."""
        self._thread.shutdown()
        kept = self._journal is not None and not self._journal.close()
        if self._store is not None:
            self._store.sweep(set(self.core.board.names) if kept else set())
            self._store.close()
        if not kept:
            forget(self._state)
            if self._keep is not None:
                self._keep.close()
        self._lock.close()
        sweep()  # what workers left that ended before us


def _elsewhere(peers: dict[Peer, OfPeer], ours: set[str]) -> dict[Peer, OfPeer]:
    """Those of the peers that are on another host."""

    def is_there(met: OfPeer | None) -> bool:
        if isinstance(met, WorkerMet):
            met = peers.get(met.guardian)
        return isinstance(met, GuardianMet | ClientMet) and met.shm_host not in ours

    return {peer: met for peer, met in peers.items() if is_there(met)}


def _exists(pid: int) -> bool:
    """Whether a process lives; one that nobody has waited for does not (see proc(5), /proc/pid/stat)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def _logged(work: object, *arguments: object) -> None:
    """For threads, whose errors nobody would see."""
    try:
        work(*arguments)  # type: ignore[operator]
    except Exception:
        log.exception("housekeeping failed")
