"""Guardians come, from whatever host: where its memory can be read, and who removes what nobody needs there.

The broker can remove memory on its own host only. On any other it asks one of the guardians there; a host
whose guardians are all gone is swept when one of them comes back.

On one host nothing of this costs anything: there is no other to know of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from adapters.host import host_of
from broker.core.events import Discard, Instruction, Reap, Send, SweepRun
from broker.core.find import find_stage
from broker.core.records import GuardianMet
from broker.core.state import Client, Guardian
from broker.protocol import VERSION, Hello, Hosts, Left, Message, Peer, Reject, Sweep, Unlink, Welcome

if TYPE_CHECKING:
    from broker.core.machine import Core


class HostDesk:
    """What the core knows of hosts.

    Args:
        core: Whose peers they are.
        here: The broker's own host, see :func:`adapters.host.this_host`.
    """

    def __init__(self, core: Core, here: str) -> None:
        self.here = here
        self.book: dict[str, list[str]] = {}  #: host or disk store -> addresses of its living data servers
        self.others: dict[str, dict[Peer, Guardian]] = {}  #: host that is not ours -> the guardians there
        self._core = core
        self._servers: dict[Peer, tuple[list[str], list[str]]] = {}  #: who serves -> (names, addresses)
        self.handlers: dict[type[Message], Callable[[float, Peer, Any], None]] = {
            Hello: self._on_hello,
            Left: self._on_left,
        }

    def _on_hello(self, now: float, peer: Peer, m: Hello) -> None:
        core = self._core
        stage = find_stage(m, core.board.pipelines)
        if isinstance(stage, str):
            core.board.send(peer, Reject(stage))
            return
        guardian = core.guardians.get(peer)
        if guardian is None:
            guardian = Guardian(peer, stage, now)
            core.guardians[peer] = stage.guardians[peer] = guardian
            core.know_again(peer)
        stage, pipeline = guardian.stage, guardian.stage.pipeline.spec
        where = m.host, m.pid, m.device, m.shm_host, m.store_host, m.data
        met = GuardianMet(pipeline.name, stage.name, *where)
        guardian.introduce(met)
        core.board.log.peer(peer, met)
        about = core.settings.beat_s, core.boot, core.store, self.here
        core.board.send(peer, Welcome(VERSION, core.run, pipeline, stage.name, *about))
        self.tell(peer)
        self.met(guardian)

    def _on_left(self, now: float, peer: Peer, m: Left) -> None:
        core = self._core
        if peer not in core.guardians:
            core.stranger(peer, m)
            return
        if core.awaited or core.board.blocks.in_limbo:  # who is still to report may need them
            core.sweep_soon()
            return
        needed = core.needed_arenas()
        arenas = [arena for arena in m.arenas if arena not in needed and core.may_own(arena)]
        names = [name for name in m.names if name not in core.board.names]
        if arenas or names:
            core.board.send(peer, Unlink(arenas, names))

    def met(self, peer: Guardian | Client) -> None:
        """A peer has come, or says something else of its host than before."""
        if isinstance(peer, Guardian) and peer.shm_host not in ("", self.here):
            there = self.others.setdefault(peer.shm_host, {})
            if peer.peer not in there:
                there[peer.peer] = peer
                self._core.sweep_soon()  # what died there while nobody could tell us
        names = [name for name in (peer.shm_host, peer.store_host) if name]
        serves = (names, peer.data) if peer.data else None
        if serves != self._servers.get(peer.peer):
            self._servers.pop(peer.peer, None)
            if serves is not None:
                self._servers[peer.peer] = serves
            self._renew()

    def gone(self, peer: Guardian | Client) -> None:
        """A peer is there no longer, and no more is its data server."""
        there = self.others.get(peer.shm_host, {})
        if there.pop(peer.peer, None) is not None and not there:
            del self.others[peer.shm_host]
        if self._servers.pop(peer.peer, None) is not None:
            self._renew()

    def _renew(self) -> None:
        book: dict[str, list[str]] = {}
        for names, addresses in self._servers.values():
            for name in names:
                book.setdefault(name, []).extend(addresses)
        self.book = book
        core = self._core
        guardians = [guardian.peer for guardian in core.guardians.values() if not guardian.ghost]
        for peer in (*guardians, *core.workers, *core.clients):
            if peer not in core.awaited:
                core.board.send(peer, Hosts(book))

    def tell(self, peer: Peer) -> None:
        """A peer begins: it learns where others' memory is."""
        if self.book:
            self._core.board.send(peer, Hosts(self.book))

    def report(self) -> dict[str, Any]:
        """For people: our own name, who is on which other host, and where each can be read."""
        others = {
            host: [f"{g.stage.label} {g.pid}" for g in there.values()] for host, there in self.others.items()
        }
        return {"here": self.here, "others": others, "book": self.book}

    # --- memory on other hosts

    def route(self, out: list[Instruction]) -> list[Instruction]:
        """The same instructions, and those of them that concern other hosts told to the guardians there."""
        told: list[Instruction] = []
        unlinks: dict[str, Unlink] = {}
        for item in out:
            if type(item) is Reap:
                for host in self.others.keys() & {host_of(item.arena)}:
                    unlinks.setdefault(host, Unlink([], [])).arenas.append(item.arena)
            elif type(item) is Discard:
                for host in self.others:
                    unlinks.setdefault(host, Unlink([], [])).names.append(item.name)
            elif type(item) is SweepRun:
                told += [Send(keeper, Sweep()) for keeper in self._keepers(self.others)]
        for host, unlink in unlinks.items():
            told += [Send(keeper, unlink) for keeper in self._keepers([host])]
        return out + told if told else out

    def _keepers(self, hosts: Iterable[str]) -> list[Peer]:
        """One guardian of each host that has been heard; where there is none, a sweep makes up for it."""
        found = []
        for host in hosts:
            keeper = next((g.peer for g in self.others[host].values() if not g.ghost), None)
            if keeper is None:
                self._core.sweep_soon()
            else:
                found.append(keeper)
        return found
