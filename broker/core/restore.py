"""A core out of a journal: the records replayed, then the peers awaited.

Replaying calls the same methods that made the records, with nobody listening: what they say is thrown away.
Engines and clients of the dead broker become ghosts, which hold their leases and requests until they have
introduced themselves (:meth:`broker.core.machine.Core`) or are known to be gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from adapters.handle import Chunk, Handle
from broker.core import admission
from broker.core.blocks import arena_of
from broker.core.lifecycle import TaskState
from broker.core.machine import Core
from broker.core.records import (
    Again,
    ClientMet,
    Closed,
    Finished,
    GuardianMet,
    Joined,
    Kept,
    Leased,
    Marked,
    OfPeer,
    OfRequest,
    Opened,
    WorkerMet,
)
from broker.core.routes import BadRequest
from broker.core.state import Client, Guardian, Request, Task, Worker
from broker.protocol import Error, Peer


def restore(
    core: Core,
    peers: dict[Peer, OfPeer],
    records: Iterable[tuple[int, OfRequest]],
    now: float,
    *,
    shift: float = 0.0,
    lost: Callable[[Handle], bool] = lambda handle: False,
) -> None:
    """Fills a fresh core.

    Args:
        core: Has handled nothing yet.
        peers: Those that may still live.
        records: (request, record) in the order in which they were written.
        now: The shell's clock.
        shift: What to add to times in the records, where the clock began anew.
        lost: Whether a tensor's bytes are nowhere any more.

    Afterwards ``core.handle`` takes events, of which the first should be a Tick; requests that can't go on
    have been ended, which :meth:`Core.take_records` and that Tick's instructions show.
    """
    replay = _Replay(core, now, shift)
    log, core.board.log.enabled = core.board.log.enabled, False
    core.board.now = now
    core.board.blocks.enter_limbo()
    replay.meet(peers)
    for number, record in records:
        replay.apply(number, record)
    core.board.blocks.forget_holds([])
    core.board.log.enabled = log
    core.board.out = []
    replay.settle(lost)


class _Replay:
    def __init__(self, core: Core, now: float, shift: float) -> None:
        self.core = core
        self.board = core.board
        self.now = now
        self.shift = shift
        self.owners: dict[str, Peer] = {}
        self.unknown: set[int] = set()  #: requests of pipelines that are no longer served
        self.strays: list[Peer] = []  #: workers without a guardian, guardians of stages no longer served

    def meet(self, peers: dict[Peer, OfPeer]) -> None:
        """Guardians first, then those that they stand for."""
        for peer, record in peers.items():
            if isinstance(record, GuardianMet):
                self._meet_guardian(peer, record)
            elif isinstance(record, ClientMet):
                client = self.core.clients[peer] = Client(peer, record.kind, self.now)
                client.arena, client.data = record.arena, record.data
                client.shm_host, client.store_host = record.shm_host, record.store_host
                self.core.hosts.met(client)
                self._await(peer, record.arena)
        for peer, record in peers.items():
            if isinstance(record, WorkerMet):
                self._meet_worker(peer, record)

    def _meet_guardian(self, peer: Peer, record: GuardianMet) -> None:
        pipeline = self.board.pipelines.get(record.pipeline)
        for stage in pipeline.stages if pipeline is not None else ():
            if stage.name == record.stage:
                guardian = Guardian(peer, stage, self.now)
                guardian.introduce(record)
                guardian.ghost = True
                self.core.guardians[peer] = stage.guardians[peer] = guardian
                self.core.hosts.met(guardian)
                return
        self.strays.append(peer)

    def _meet_worker(self, peer: Peer, record: WorkerMet) -> None:
        guardian = self.core.guardians.get(record.guardian)
        if guardian is None:
            self.strays.append(peer)
            return
        stage = guardian.stage
        worker = Worker(peer, stage, guardian, self.now)
        worker.pid, worker.arena, worker.resumes = record.pid, record.arena, record.resumes
        worker.capacity, worker.ghost = record.capacity, True
        self.core.workers[peer] = stage.workers[peer] = guardian.workers[peer] = worker
        self._await(peer, record.arena)

    def _await(self, peer: Peer, arena: str) -> None:
        self.core.awaited[peer] = None
        if arena:
            self.owners[arena] = peer

    def apply(self, number: int, record: OfRequest) -> None:
        """One record's effect."""
        if isinstance(record, Opened):
            self._open(number, record)
            return
        request = self.board.requests.get(number)
        if request is None:
            return
        if isinstance(record, Joined):
            self._join(request, record.client, record.tag)
            return
        if isinstance(record, Closed):
            if request.ended is None:
                self.core.requests.end(request, record.status, record.error, record.letter)
            request.left = record.at + self.shift
            if request.ended is not None:
                request.ended.timings = record.timings
            return
        task = request.tasks.get(record.stage)
        if task is not None and task.state is not TaskState.DONE:
            _OF_TASK[type(record)](self, task, record)

    def _open(self, number: int, record: Opened) -> None:
        submit = record.submit
        try:
            pipeline, route = admission.route(submit, self.board.pipelines)
        except BadRequest:
            self.unknown.add(number)
            return
        request = admission.build(number, submit, pipeline, route, record.accepted + self.shift)
        request.files = True  # of what was written nobody may have told us
        for chunks in submit.given.values():
            for chunk in chunks:
                self._adopt(chunk)
        self._join(request, record.client, submit.tag)
        self.core.requests.open(request, record.seed)

    def _join(self, request: Request, peer: Peer, tag: int) -> None:
        self.core.requests.part(request)
        client = request.client = self.core.clients.get(peer)
        request.tag = tag
        for gauge in request.gauges.values():
            gauge.open = client is not None
        if client is not None:
            client.requests[tag] = request
            client.unclaimed.add(tag)

    def _adopt(self, chunk: Chunk) -> None:
        for handle in chunk.handles:
            arena = arena_of(handle.block)
            owner = self.owners.get(arena)
            if owner is None:
                owner = self.owners[arena] = arena.encode()
                if arena:
                    self.board.blocks.orphan(owner, arena)
            self.board.blocks.adopt(owner, [handle])

    def _leased(self, task: Task, record: Leased) -> None:
        self._off(task)
        task.attempt = record.attempt
        worker = self.core.workers.get(record.worker)
        if worker is None:
            task.stage.scheduler.push(task)
        else:
            self.core.tasks.lease(task, worker)
            self._go_on_counting(task, record.at + self.shift)
        self.core.tasks.forget_delivered(task)

    def _go_on_counting(self, task: Task, began: float) -> None:
        """A hung engine gets no new time by the broker's death, a live one enough to introduce itself."""
        limit, silence_s = task.stage.spec.retry.timeout_s, self.core.settings.liveness_s
        task.started = min(self.now, max(began, self.now - limit + silence_s))

    def _kept(self, task: Task, record: Kept) -> None:
        if record.chunk.seq == task.emitted:
            self._adopt(record.chunk)
            self.core.tasks.flow.keep(task, record.chunk)
            if record.chunk.last:
                self._off(task)
                self.core.tasks.done(task)

    def _marked(self, task: Task, record: Marked) -> None:
        self._adopt(record.chunk)
        self.core.tasks.mark(task, record.chunk)

    def _again(self, task: Task, record: Again) -> None:
        self._off(task)
        task.blame, task.solo = record.blame, record.solo
        task.queued = self.now
        task.stage.scheduler.push(task)

    def _finished(self, task: Task, record: Finished) -> None:
        self._off(task)
        self.core.tasks.done(task)

    def _off(self, task: Task) -> None:
        """Out of the queue, or away from its worker."""
        if task.state is TaskState.QUEUED:
            task.state = TaskState.WAITING
            task.stage.scheduler.forget(task)
        elif task.worker is not None:
            task.worker.tasks.pop(task.key, None)
            task.worker = None
            task.state = TaskState.WAITING

    def settle(self, lost: Callable[[Handle], bool]) -> None:
        """What can't go on ends; what nobody waits for has a time to be asked for."""
        requests = self.core.requests
        for number in self.unknown:
            self.board.log.drop(number)
        for peer in self.strays:
            self.board.log.peer(peer, None)
        for request in list(self.board.requests.values()):
            if request.letter:
                continue
            self._forget_lost_states(request, lost)
            self._forget_delivered(request, lost)
            if _has_lost(request, lost):
                if request.ended is not None:
                    requests.forget(request)
                    continue
                message = "the machine was restarted, and part of this request was kept in memory only"
                error = Error("lost_in_restart", message, 503, retry_after_s=1.0)
                requests.end(request, "failed", error, False)
                requests.cut_outputs(request, lost)
            if request.client is None:
                requests.detach(request)

    def _forget_delivered(self, request: Request, lost: Callable[[Handle], bool]) -> None:
        """Edges that keep nothing: what a ghost was sent and has released is no loss, it has had it."""
        for task in request.tasks.values():
            for feed in task.feeds:
                if feed.forgets and task.state is TaskState.RUNNING:
                    known = [at for at, chunk in enumerate(feed.chunks, 1) if any(map(lost, chunk.handles))]
                    had = feed.chunks[: known[-1]] if known else []
                    for chunk in had:
                        self.board.blocks.drop(chunk.handles, self.board.out)
                    feed.chunks = feed.chunks[len(had) :]
                    feed.gone += len(had)

    def _forget_lost_states(self, request: Request, lost: Callable[[Handle], bool]) -> None:
        for task in request.tasks.values():
            state = task.checkpoint
            if state is not None and any(map(lost, state.handles)):
                self.board.blocks.drop(state.handles, self.board.out)
                task.checkpoint = None


_OF_TASK: dict[type, Callable[[_Replay, Task, Any], None]] = {
    Leased: _Replay._leased,
    Kept: _Replay._kept,
    Marked: _Replay._marked,
    Again: _Replay._again,
    Finished: _Replay._finished,
}


def _has_lost(request: Request, lost: Callable[[Handle], bool]) -> bool:
    kept = [chunk for task in request.tasks.values() for feed in task.feeds for chunk in feed.chunks]
    kept += [chunk for _, chunk in request.outputs]
    return any(lost(handle) for chunk in kept for handle in chunk.handles)
