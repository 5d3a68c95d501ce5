"""The state machine: who is there, what they say, and what follows from it.

``handle(event)`` is the only way in. This file has the peers (guardians, workers, clients) and their
lifetimes, :mod:`broker.core.clients` what clients want, :mod:`broker.core.results` what workers say of
their tasks; :mod:`broker.core.requests` has the requests, :mod:`broker.core.tasks` their tasks.

A core that was restored from a journal (:mod:`broker.core.restore`) awaits the engines and clients of its
predecessor: it asks them who they are until each has introduced itself or is known to be gone.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from broker.core import scaling
from broker.core.board import Board
from broker.core.clients import ClientDesk
from broker.core.events import Event, Gone, Instruction, Lost, Note, Received, SweepRun, Tick
from broker.core.hosts import HostDesk
from broker.core.introductions import Introductions
from broker.core.records import Batch, Log, WorkerMet
from broker.core.requests import Requests
from broker.core.requests import Settings as RequestSettings
from broker.core.results import Results
from broker.core.state import Client, Guardian, Worker
from broker.protocol import (
    VERSION,
    Beat,
    Bye,
    Died,
    Drain,
    Message,
    Peer,
    Ready,
    Reject,
    Release,
    Resync,
    Seen,
    Who,
)
from pipelines.graph import Pipeline

GIVEN_UP = 10_000  #: peers that we remember to have given up
SELDOM = 6  #: times `sweep_s`: one that was given up may have lived on, and have died since


class Settings(msgspec.Struct, frozen=True):
    """Time limits, in seconds."""

    beat_s: float = 1.0  #: how often guardians and clients say that they live
    liveness_s: float = 6.0  #: silence after which they are taken for dead
    cancel_grace_s: float = 10.0  #: a worker that keeps a cancelled task for longer is killed
    sweep_s: float = 10.0  #: how soon memory of processes that were given up is looked for, at most
    requests: RequestSettings = RequestSettings()


class Core:
    """The broker without its sockets.

    Args:
        pipelines: What to serve; names are distinct.
        run: The run's nonce, 16 hexadecimal digits.
        entropy: 64 random bits; seeds of requests that bring none are drawn from it.
        first_request: The first request's number.
        boot: Differs for each core of a run.
        store: The disk store's folder, for those who ask.
        host: Where we are, see :func:`adapters.host.this_host`.
        journal: Whether :meth:`take_records` is to give anything.
    """

    def __init__(
        self,
        pipelines: list[Pipeline],
        *,
        run: str,
        entropy: int = 0,
        first_request: int = 1,
        boot: int = 1,
        store: str = "",
        host: str = "",
        journal: bool = False,
        settings: Settings | None = None,
    ) -> None:
        self.run = run
        self.boot = boot
        self.store = store
        self.settings = settings or Settings()
        self.board = Board(pipelines, Log(enabled=journal), self.settings.requests.block_bytes)
        self.requests = Requests(
            self.board,
            entropy=entropy,
            first_request=first_request,
            settings=self.settings.requests,
        )
        self.tasks = self.requests.tasks
        self.guardians: dict[Peer, Guardian] = {}
        self.workers: dict[Peer, Worker] = {}
        self.clients = self.board.clients
        self.awaited = Introductions(boot)  #: whose Resync is still to come
        self.hosts = HostDesk(self, host)
        self._given_up: OrderedDict[Peer, None] = OrderedDict()
        self._sweep_due = False
        self._swept = 0.0
        self._ticked = 0.0
        self._out = self.board.out
        self._handlers: dict[type[Message], Callable[[float, Peer, Any], None]] = {
            **Results(self).handlers,
            Release: self._on_release,
            Resync: self._on_resync,
            **ClientDesk(self).handlers,
            Beat: self._on_beat,
            **self.hosts.handlers,
            Ready: self._on_ready,
            Died: self._on_died,
            Bye: self._on_bye,
        }

    def handle(self, event: Event) -> list[Instruction]:
        """Takes one event in and says what is to be done about it, in order."""
        out: list[Instruction] = []
        self._out = self.board.out = out
        self.board.now = event.now
        if type(event) is Received:
            self._on_message(event.now, event.peer, event.message)
        elif type(event) is Tick:
            self._on_tick(event.now)
        elif type(event) is Lost:
            self._on_lost(event.now, event.peer)
        elif type(event) is Gone:
            self._on_gone(event.now, event.peer)
        return self.hosts.route(out) if self.hosts.others else out

    def _on_message(self, now: float, peer: Peer, m: Message) -> None:
        known = peer not in self.awaited or (type(m) is Bye and peer in self.clients)
        if known and type(m) is not Resync:  # a second Resync has no effect
            self._handlers[type(m)](now, peer, m)
        elif not known:
            for message in self.awaited.admit(peer, m):
                self._handlers[type(message)](now, peer, message)
            if type(m) is Resync and peer not in self.awaited:
                self._introduced(peer, m)

    def take_records(self) -> Batch:
        """What must be in the journal before any instruction since the last call is carried out."""
        return self.board.log.take()

    def _send(self, peer: Peer, message: Message) -> None:
        self.board.send(peer, message)

    def _note(self, text: str, level: int = logging.INFO) -> None:
        self._out.append(Note(level, text))

    def stranger(self, peer: Peer, message: Message) -> None:
        """A peer that is not (or no longer) known speaks: it learns so, and its message has no effect."""
        self.board.refused[f"stranger:{type(message).__name__}"] += 1
        self._sweep_due = True  # nobody frees what it has written
        self._send(peer, Who(self.boot, peer in self._given_up))

    def _give_up(self, peer: Peer) -> None:
        """From now on the peer is a stranger that was known."""
        self.awaited.pop(peer, None)
        self.board.log.peer(peer, None)
        self._given_up[peer] = None
        self._sweep_due = True  # while it lives it may go on making segments
        if len(self._given_up) > GIVEN_UP:
            self._given_up.popitem(last=False)

    def know_again(self, peer: Peer) -> None:
        """The peer begins anew."""
        if peer in self._given_up:
            del self._given_up[peer]
            self._sweep_due = True  # until now it went on writing what nobody will hear of

    def knows(self, peer: Peer) -> bool:
        """Whether it is one of ours, heard or awaited. What others are sent may be lost."""
        return peer in self.workers or peer in self.clients or peer in self.guardians or peer in self.awaited

    def sweep_soon(self) -> None:
        """There may be something that nobody frees."""
        self._sweep_due = True

    # --- guardians and workers

    def may_own(self, arena: str) -> bool:
        """Whether this can be one producer's arena: a shorter prefix would claim other producers' blocks."""
        return not arena or re.fullmatch(rf"omni-{self.run}-[0-9a-f]{{8,32}}-", arena) is not None

    def _on_ready(self, now: float, peer: Peer, m: Ready) -> None:
        guardian = self.guardians.get(m.guardian)
        if peer not in self.workers and (m.leases or m.sent):  # a broker before us had given it up
            self._send(peer, Who(self.boot, gone=True))
            return
        if m.version != VERSION or guardian is None or peer in self._given_up:
            self.stranger(peer, m)
            return
        if not self.may_own(m.arena):
            self._send(peer, Reject(f"{m.arena!r} is no arena of this run"))
            return
        worker = self.workers.get(peer)
        if worker is None and peer not in guardian.dead:
            stage = guardian.stage
            worker = Worker(peer, stage, guardian, now)
            worker.pid, worker.arena, worker.resumes = m.pid, m.arena, m.resumes
            worker.capacity = m.capacity
            self.workers[peer] = stage.workers[peer] = guardian.workers[peer] = worker
            self.board.log.peer(peer, WorkerMet(m.guardian, m.pid, m.arena, m.resumes, m.capacity))
            self._note(f"{stage.pipeline.name}/{stage.name}: worker {m.pid} is ready")
            self._begin(worker, m)
        elif worker is not None:
            was_ghost, worker.ghost = worker.ghost, False
            if was_ghost:
                self._begin(worker, m)
            else:  # it comes twice; so do the results that follow
                worker.results = worker.seen = m.sent

    def _begin(self, worker: Worker, m: Ready) -> None:
        worker.results = worker.seen = m.sent
        self.hosts.tell(worker.peer)
        self.tasks.adopt(worker, m.leases)
        self.tasks.worker_ready(worker, worker.capacity - len(worker.tasks))

    def _on_beat(self, now: float, peer: Peer, m: Beat) -> None:
        known = self.guardians.get(peer) or self.clients.get(peer)
        if known is None and peer in self.workers:  # its connection broke, and it asks who is here
            self._send(peer, Who(self.boot))
            return
        if known is None:
            self.stranger(peer, m)
            return
        known.seen = now
        if isinstance(known, Guardian):
            known.ghost = False
            for worker in [w for w in known.workers.values() if w.ghost and w.peer not in m.workers]:
                self._worker_gone(worker, "it died while the broker was away")
            for worker in [w for w in known.workers.values() if w.doomed]:
                self.tasks.kill(worker, worker.doomed)
            for stranger in m.workers:  # its Ready may have died with a broker
                if stranger not in self.workers and stranger not in known.dead:
                    self._send(stranger, Who(self.boot, stranger in self._given_up))

    def _on_died(self, now: float, peer: Peer, m: Died) -> None:
        guardian = self.guardians.get(peer)
        if guardian is None:
            self._given_up[m.worker] = None  # its Ready may still come, after its guardian's next Hello
            self.stranger(peer, m)
            return
        guardian.seen, guardian.ghost = now, False
        worker = guardian.workers.get(m.worker)
        if worker is not None:
            self._worker_gone(worker, m.cause)
        else:
            guardian.dead.append(m.worker)  # its Ready may still be under way on its own connection
            self._sweep_due = True

    def _worker_gone(self, worker: Worker, cause: str, *, innocent: bool = False) -> None:
        stage = worker.stage
        for table in (self.workers, stage.workers, worker.guardian.workers):
            del table[worker.peer]
        self._give_up(worker.peer)
        if worker.draining and not worker.tasks:
            self._note(f"{stage.pipeline.name}/{stage.name}: worker {worker.pid} has left")
        else:
            text = f"{stage.pipeline.name}/{stage.name}: worker {worker.pid} died ({cause})"
            self._note(f"{text} with {len(worker.tasks)} tasks", logging.WARNING)
        self.tasks.worker_gone(worker, cause, innocent=innocent)

    def _guardian_gone(self, now: float, guardian: Guardian, cause: str) -> None:
        del self.guardians[guardian.peer], guardian.stage.guardians[guardian.peer]
        self.hosts.gone(guardian)
        self._give_up(guardian.peer)
        for worker in list(guardian.workers.values()):
            self._worker_gone(worker, cause, innocent=True)  # it was not an engine that died first

    # --- memory

    def _on_release(self, now: float, peer: Peer, m: Release) -> None:
        self.board.blocks.release(peer, m.blocks, self._out)

    def _on_resync(self, now: float, peer: Peer, m: Resync) -> None:
        self.board.blocks.claim(peer, m.holds, self._owners())

    def _introduced(self, peer: Peer, m: Resync) -> None:
        """Everything that the peer had to say has been handled."""
        self.board.blocks.audit(peer, m.lent, self._out)
        client = self.clients.get(peer)
        if client is not None:
            self.hosts.tell(peer)
            for request in [client.requests[tag] for tag in client.unclaimed]:
                self.requests.abort(request, leave=True)  # it gave them up while we were away
            client.unclaimed.clear()
        self._settle()

    def _settle(self) -> None:
        """When all who live have reported after a restart, what nobody needs may go."""
        blocks = self.board.blocks
        if self.awaited:
            return
        if blocks.in_limbo:
            blocks.leave_limbo(self._out)
        elif not self._late():
            return
        self._sweep_due, self._swept = False, self.board.now
        self._out.append(SweepRun(self.needed_arenas()))

    def needed_arenas(self) -> frozenset[str]:
        """Those of the living, and those of the dead of which something is still read."""
        return frozenset(self._owners()) | self.board.blocks.orphaned

    def _late(self) -> bool:
        """Whether it is time to look for what the dead have left."""
        since = self.board.now - self._swept
        if self._sweep_due:
            return since > self.settings.sweep_s
        return bool(self._given_up) and since > SELDOM * self.settings.sweep_s

    def _owners(self) -> dict[str, Peer]:
        """Arena -> whose it is."""
        owners = {worker.arena: worker.peer for worker in self.workers.values()}
        owners |= {client.arena: client.peer for client in self.clients.values()}
        owners.pop("", None)
        return owners

    def _client_gone(self, client: Client, *, on_purpose: bool = False) -> None:
        del self.clients[client.peer]
        self.hosts.gone(client)
        self._give_up(client.peer)
        self.requests.client_gone(client, on_purpose=on_purpose)
        self.board.blocks.peer_gone(client.peer, client.arena, self._out)

    # --- comings and goings

    def _on_bye(self, now: float, peer: Peer, m: Bye) -> None:
        worker = self.workers.get(peer)
        if worker is not None:  # it drains: takes nothing new, finishes what it has
            worker.draining = True
            self.tasks.stop_feeding(worker)
            self._send(peer, Drain())  # after this nothing more is under way to it
        elif (client := self.clients.get(peer)) is not None:
            self._client_gone(client, on_purpose=True)
        elif (guardian := self.guardians.get(peer)) is not None:
            self._guardian_gone(now, guardian, "its guardian has left")
        self._settle()

    def _on_gone(self, now: float, peer: Peer) -> None:
        if (worker := self.workers.get(peer)) is not None and worker.ghost:
            self._worker_gone(worker, "it died while the broker was away")
        elif (guardian := self.guardians.get(peer)) is not None:
            self._guardian_gone(now, guardian, "its guardian died while the broker was away")
        self._settle()

    def _on_lost(self, now: float, peer: Peer) -> None:
        if peer in self.awaited:
            self.awaited[peer] = None  # it will connect and begin anew, or its guardian's silence ends it
            return
        if (client := self.clients.get(peer)) is not None:
            self._client_gone(client)
        elif (guardian := self.guardians.get(peer)) is not None and not guardian.ghost:
            self._guardian_gone(now, guardian, "its guardian is gone")
        elif (worker := self.workers.get(peer)) is not None and not worker.broken:
            # Messages to it were lost, so what it does now may be wrong: its tasks belong to somebody else.
            # One that drains may miss the answer that it waits for before it ends.
            worker.draining = worker.broken = True
            self.tasks.stop_feeding(worker)
            self.tasks.kill(worker, "killed: its connection to the broker broke")

    def _stood_still(self, now: float) -> bool:
        """Whether this process did since the last tick, so that it heard nobody: that is nobody's silence."""
        first, stood_s, self._ticked = not self._ticked, now - self._ticked - self.settings.beat_s, now
        if stood_s <= self.settings.beat_s:
            return False
        peers: list[Guardian | Client] = [*self.guardians.values(), *self.clients.values()]
        for peer in peers:
            peer.seen = min(peer.seen + stood_s, now)
        if first:
            return True  # what restored attempts have taken counts
        for worker in self.workers.values():  # if the whole machine did, so did they
            for task in worker.tasks.values():
                task.started = min(task.started + stood_s, now)
                task.stopped = min(task.stopped + stood_s, now)
            worker.strays = {name: min(told + stood_s, now) for name, told in worker.strays.items()}
        return True

    def _on_tick(self, now: float) -> None:
        unheard = self._stood_still(now)
        silence = now - self.settings.liveness_s
        for guardian in [g for g in self.guardians.values() if g.seen < silence]:
            self._guardian_gone(now, guardian, f"its guardian was silent for {self.settings.liveness_s:g} s")
        for client in [c for c in self.clients.values() if c.seen < silence]:
            self._note(f"{client.kind} was silent for {self.settings.liveness_s:g} s", logging.WARNING)
            self._client_gone(client)
        for peer, guardian in self.guardians.items():  # it tells probes whether its engine is ready
            self._send(peer, Beat(list(guardian.workers)))
        for peer in self.clients:
            self._send(peer, Beat())  # tells them that the broker lives, and the shell whether they do
        for peer in self.awaited:
            self._send(peer, Who(self.boot))
        self.requests.tick()
        for worker in self.workers.values():
            if not unheard:  # what would have kept a limit may be waiting to be read
                self.tasks.check_time_limits(worker, self.settings.cancel_grace_s)
            if worker.results != worker.seen:
                worker.seen = worker.results
                self._send(worker.peer, Seen(worker.results))
        for pipeline in self.board.pipelines.values():
            scaling.look(pipeline.stages, now)
        self._settle()
