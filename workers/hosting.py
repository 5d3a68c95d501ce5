"""What a guardian does for its host in a run that spans several: serves memory, removes what nobody needs.

On the broker's own host the broker removes things itself; there a guardian only serves, if it is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from adapters.disk import DiskStore
from adapters.segment import shm_dir
from adapters.store import Store, open_store
from adapters.sweep import Listed, RunLock, segments, sweep, unlink_owner
from broker.protocol import Hosts, Left, Message, Sweep, Unlink, Welcome
from broker.serving import Serving, data_address, store_here

log = logging.getLogger("guardian")

LOOK_S = 0.1  #: between two looks at what is still needed here

Place = tuple[str, str, list[str]]  #: the last fields of a Hello: shm_host, store_host, data


class Hosting:
    """One guardian's part.

    Args:
        endpoint: The broker's.
        data_host: Where to serve, see :func:`broker.serving.data_address`.
        post: Says something to the broker.

    Raises AddressError for a ``data_host`` that is none.
    """

    def __init__(self, endpoint: str, data_host: str | None, post: Callable[[Message], None]) -> None:
        self._post = post
        self._folder = shm_dir()
        self._serving = Serving(data_address(endpoint, data_host))
        self._run = ""
        self._text = ""
        self._store: Store | None = None
        self._away = False  #: the broker is on another host
        self._lock: RunLock | None = None
        self._leaving = False
        self._told: Place | None = None
        self._book: dict[str, list[str]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hosting")
        self.handlers: dict[type, Callable[[Any], None]] = {
            Hosts: self._on_hosts,
            Unlink: self._on_unlink,
            Sweep: self._on_sweep,
        }

    # --- what the broker hears

    def place(self) -> Place:
        """Where we are, for a Hello that goes out now."""
        self._told = self._place()
        return self._told

    @property
    def untold(self) -> bool:
        """Whether the broker has heard something else."""
        return self._told != self._place()

    def _place(self) -> Place:
        return (self._serving.host, self._serving.store_host, self._serving.data)

    # --- the run

    def begin(self, welcome: Welcome, adapted: Callable[[str], str]) -> None:
        """A broker has answered: from now on we serve its run, and say here that it lives.

        Args:
            welcome: Its answer.
            adapted: Makes of the broker's store the one that is used from here.

        Raises AdapterError or AddressError where that can't be.
        """
        if self._run == welcome.run:
            return
        self._end()
        self._text = adapted(store_here(welcome.store, welcome.shm_host, welcome.run))
        self._away = welcome.shm_host not in ("", self._serving.host)
        self._store = open_store(self._text) if self._text else None
        if self._away and self._serving.address is None:  # it was reached by a file or by loopback
            self._serving.address = "127.0.0.1"
        self._serving.begin(welcome.run, self._store)
        self._run = welcome.run
        if self._away:
            self._do(self._move_in)

    @property
    def store(self) -> str:
        """What engines here write to."""
        return self._text

    def _move_in(self) -> None:
        with contextlib.suppress(OSError):  # another guardian has it
            self._lock = RunLock(self._run, self._folder)
        sweep(self._folder)  # what runs that are over have left

    def hold(self) -> None:
        """Keeps others from taking the run for dead here. Due now and then: one guardian does it for all."""
        self._serving.look()
        if self._away and self._lock is None and not self._leaving:
            self._do(self._take_over)

    def _take_over(self) -> None:
        if self._lock is None:
            with contextlib.suppress(OSError):
                self._lock = RunLock(self._run, self._folder, tries=1)

    def _on_hosts(self, message: Hosts) -> None:
        self._book = message.book

    def _on_unlink(self, message: Unlink) -> None:
        self._do(self._unlink, message)

    def _unlink(self, message: Unlink) -> None:
        for arena in message.arenas:
            if arena.startswith(f"omni-{self._run}-"):
                for swept in unlink_owner(arena, self._folder):
                    log.debug("removed %s (%d bytes), whose owner is gone", swept.name, swept.bytes)
        if isinstance(self._store, DiskStore):
            for name in message.names:
                self._store.discard(name)

    def _on_sweep(self, message: Sweep) -> None:
        loop = asyncio.get_running_loop()
        self._do(self._look, lambda left: loop.call_soon_threadsafe(self._post, left))

    def _look(self, tell: Callable[[Left], None]) -> None:
        arenas = {item.name.rpartition("-")[0] + "-" for item in self._dead()}
        names = self._store.names() if isinstance(self._store, DiskStore) else []
        if arenas or names:
            tell(Left(sorted(arenas), names))

    def _dead(self) -> list[Listed]:
        """Segments of the run whose owners are dead."""
        return [item for item in segments(self._folder) if item.run == self._run and not item.owner_alive]

    def _do(self, work: Callable[..., object], *arguments: object) -> None:
        """On a thread, one after the other: it may take a while, and a guardian has to beat."""

        def logged() -> None:
            try:
                work(*arguments)
            except Exception:
                log.exception("housekeeping failed")

        self._thread.submit(logged)

    # --- the end

    async def linger(self, timeout_s: float, alive: Callable[[], bool], hurry: asyncio.Event) -> None:
        """Waits until what our engines have left is needed no longer, if nobody else here looks after it.

        Of several that leave a host at once, the one with the run's lock waits for all.

        Args:
            timeout_s: How long at most.
            alive: Whether the broker, which has it removed, is there.
            hurry: Ends the wait.
        """
        serving, ours = set(self._book.get(self._serving.host, [])), set(self._serving.data)
        if not ours or (serving - ours and not self._away):
            return
        self._leaving = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while alive() and not hurry.is_set() and loop.time() < deadline and await self._must_stay():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await hurry.wait()

    async def _must_stay(self) -> bool:
        """Whether the dead have left something here, and we are the one to wait for its end."""
        if not self._away:
            return bool(self._dead())
        await asyncio.get_running_loop().run_in_executor(self._thread, self._take_over)
        if self._lock is None:
            return False
        if self._dead():
            return True
        self._lock.close()  # from here on whoever leaves takes it,
        self._lock = None
        return bool(self._dead())  # and an engine whose guardian still saw it with us is dead by now

    def close(self, *, sweeps: bool) -> None:
        """Ends our part. ``sweeps``: with the broker gone, nobody else removes what is here."""
        self._end()
        if sweeps and self._away:
            self._do(sweep, self._folder)
        self._thread.shutdown()

    def _end(self) -> None:
        self._serving.close()
        self._thread.submit(lambda: None).result()  # what was begun is done
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._store is not None and self._away:
            self._store.close()
        elif self._store is not None:
            self._store.leave()
        self._store = None
