"""The state machine: who is there, what they say, and what follows from it.

``handle(event)`` is the only way in. This file has the peers (guardians, workers, clients) and their
lifetimes; :mod:`broker.core.tasks` has the requests and their tasks.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from broker.core import report
from broker.core.events import Event, Instruction, Lost, Note, Received, Send, Tick
from broker.core.lifecycle import TaskState
from broker.core.state import Client, Guardian, StageState, Worker
from broker.core.tasks import Tasks
from broker.protocol import (
    VERSION,
    Abort,
    Beat,
    Bye,
    Checkpoint,
    Connect,
    Connected,
    Died,
    Drain,
    Emit,
    Failed,
    Finish,
    Hello,
    Inspect,
    Kill,
    Message,
    Peer,
    Ready,
    Reject,
    Release,
    Report,
    Submit,
    Welcome,
    Who,
)
from pipelines.graph import Pipeline


class Settings(msgspec.Struct, frozen=True):
    """Time limits, in seconds."""

    beat_s: float = 1.0  #: how often guardians and clients say that they live
    liveness_s: float = 6.0  #: silence after which they are taken for dead
    cancel_grace_s: float = 10.0  #: a worker that keeps a cancelled task for longer is killed


class Core:
    """The broker without its sockets.

    Args:
        pipelines: What to serve; names are distinct.
        run: The run's nonce, 16 hexadecimal digits.
        entropy: 64 random bits; seeds of requests that bring none are drawn from it.
        first_request: The first request's number.
    """

    def __init__(
        self,
        pipelines: list[Pipeline],
        *,
        run: str,
        entropy: int = 0,
        first_request: int = 1,
        settings: Settings | None = None,
    ) -> None:
        self.run = run
        self.settings = settings or Settings()
        self.guardians: dict[Peer, Guardian] = {}
        self.workers: dict[Peer, Worker] = {}
        self.clients: dict[Peer, Client] = {}
        self.refused: Counter[str] = Counter()  #: messages that came too late or from strangers, by reason
        self.tasks = Tasks(pipelines, entropy=entropy, first_request=first_request, refused=self.refused)
        self._out: list[Instruction] = []
        self._handlers: dict[type[Message], Callable[[float, Peer, Any], None]] = {
            Emit: self._from_worker(self.tasks.emit),
            Finish: self._from_worker(self.tasks.finish),
            Failed: self._from_worker(self.tasks.failed),
            Checkpoint: self._from_worker(self.tasks.checkpoint),
            Release: self._on_release,
            Submit: self._on_submit,
            Abort: self._on_abort,
            Inspect: self._on_inspect,
            Beat: self._on_beat,
            Hello: self._on_hello,
            Ready: self._on_ready,
            Died: self._on_died,
            Bye: self._on_bye,
            Connect: self._on_connect,
        }

    def handle(self, event: Event) -> list[Instruction]:
        """Takes one event in and says what is to be done about it, in order."""
        out = self._out = self.tasks.out = []
        if type(event) is Received:
            self._handlers[type(event.message)](event.now, event.peer, event.message)
        elif type(event) is Tick:
            self._on_tick(event.now)
        elif type(event) is Lost:
            self._on_lost(event.now, event.peer)
        return out

    def _send(self, peer: Peer, message: Message) -> None:
        self._out.append(Send(peer, message))

    def _note(self, text: str, level: int = logging.INFO) -> None:
        self._out.append(Note(level, text))

    def _stranger(self, peer: Peer, message: Message) -> None:
        """A peer that is not (or no longer) known speaks: it learns so, and its message has no effect."""
        self.refused[f"stranger:{type(message).__name__}"] += 1
        self._send(peer, Who())

    # --- guardians and workers

    def _on_hello(self, now: float, peer: Peer, m: Hello) -> None:
        stage = self._find_stage(m)
        if isinstance(stage, str):
            self._send(peer, Reject(stage))
            return
        if peer not in self.guardians:
            guardian = Guardian(peer, stage, now)
            guardian.host, guardian.pid, guardian.device = m.host, m.pid, m.device
            self.guardians[peer] = stage.guardians[peer] = guardian
        pipeline = stage.pipeline.spec
        self._send(peer, Welcome(VERSION, self.run, pipeline, stage.name, self.settings.beat_s))

    def _may_own(self, arena: str) -> bool:
        """Whether this can be one producer's arena: a shorter prefix would claim other producers' blocks."""
        return not arena or re.fullmatch(rf"omni-{self.run}-[0-9a-f]{{8,32}}-", arena) is not None

    def _find_stage(self, m: Hello) -> StageState | str:
        if m.version != VERSION:
            return _version_mismatch("worker", m.version)
        pipelines = self.tasks.pipelines
        if not m.pipeline and len(pipelines) > 1:
            return f"name a pipeline with --pipeline; this broker serves: {', '.join(pipelines)}"
        pipeline = pipelines.get(m.pipeline) if m.pipeline else next(iter(pipelines.values()))
        if pipeline is None:
            return f"no pipeline {m.pipeline!r}; this broker serves: {', '.join(pipelines)}"
        for stage in pipeline.stages:
            if stage.name == m.stage:
                return stage
        return f"{pipeline.name} has no stage {m.stage!r}; it has: {', '.join(pipeline.router.order)}"

    def _on_ready(self, now: float, peer: Peer, m: Ready) -> None:
        guardian = self.guardians.get(m.guardian)
        if m.version != VERSION or guardian is None:
            self._stranger(peer, m)
            return
        if not self._may_own(m.arena):
            self._send(peer, Reject(f"{m.arena!r} is no arena of this run"))
            return
        if peer in self.workers or peer in guardian.dead:
            return
        stage = guardian.stage
        worker = Worker(peer, stage, guardian, now)
        worker.pid, worker.arena, worker.resumes = m.pid, m.arena, m.resumes
        self.workers[peer] = stage.workers[peer] = guardian.workers[peer] = worker
        self._note(f"{stage.pipeline.name}/{stage.name}: worker {m.pid} is ready")
        self.tasks.worker_ready(now, worker, m.capacity)

    def _on_beat(self, now: float, peer: Peer, m: Beat) -> None:
        known = self.guardians.get(peer) or self.clients.get(peer)
        if known is None:
            self._stranger(peer, m)
            return
        known.seen = now

    def _on_died(self, now: float, peer: Peer, m: Died) -> None:
        guardian = self.guardians.get(peer)
        if guardian is None:
            self._stranger(peer, m)
            return
        guardian.seen = now
        worker = guardian.workers.get(m.worker)
        if worker is not None:
            self._worker_gone(now, worker, m.cause)
        else:
            guardian.dead.append(m.worker)  # its Ready may still be under way on its own connection

    def _worker_gone(self, now: float, worker: Worker, cause: str) -> None:
        stage = worker.stage
        for table in (self.workers, stage.workers, worker.guardian.workers):
            del table[worker.peer]
        if worker.draining and not worker.tasks:
            self._note(f"{stage.pipeline.name}/{stage.name}: worker {worker.pid} has left")
        else:
            text = f"{stage.pipeline.name}/{stage.name}: worker {worker.pid} died ({cause})"
            self._note(f"{text} with {len(worker.tasks)} tasks", logging.WARNING)
        self.tasks.worker_gone(now, worker, cause)

    def _guardian_gone(self, now: float, guardian: Guardian, cause: str) -> None:
        del self.guardians[guardian.peer], guardian.stage.guardians[guardian.peer]
        for worker in list(guardian.workers.values()):
            self._worker_gone(now, worker, cause)

    # --- what workers say about tasks

    def _from_worker(self, act: Callable[[float, Worker, Any], None]) -> Callable[[float, Peer, Any], None]:
        """A handler for messages that only a known worker may send."""

        def handle(now: float, peer: Peer, m: Message) -> None:
            worker = self.workers.get(peer)
            if worker is None:
                self._stranger(peer, m)
            else:
                act(now, worker, m)

        return handle

    def _on_release(self, now: float, peer: Peer, m: Release) -> None:
        self.tasks.blocks.release(peer, m.blocks, self._out)

    # --- clients

    def _on_connect(self, now: float, peer: Peer, m: Connect) -> None:
        if m.version != VERSION:
            self._send(peer, Reject(_version_mismatch("client", m.version)))
            return
        if not self._may_own(m.arena):
            self._send(peer, Reject(f"{m.arena!r} is no arena of this run"))
            return
        client = self.clients.get(peer)
        if client is None:
            client = self.clients[peer] = Client(peer, m.kind, now)
        client.arena = client.arena or m.arena  # a client can name its arena only when it knows our run
        pipelines = [p.spec for p in self.tasks.pipelines.values()]
        self._send(peer, Connected(VERSION, self.run, pipelines, self.settings.beat_s))

    def _on_submit(self, now: float, peer: Peer, m: Submit) -> None:
        client = self.clients.get(peer)
        if client is None:
            self._stranger(peer, m)
        else:
            self.tasks.submit(now, client, m)

    def _on_abort(self, now: float, peer: Peer, m: Abort) -> None:
        client = self.clients.get(peer)
        request = client and client.requests.get(m.tag)
        if request:
            self.tasks.end(now, request, "cancelled", None)

    def _on_inspect(self, now: float, peer: Peer, m: Inspect) -> None:
        if peer not in self.clients:
            self._stranger(peer, m)
            return
        body = msgspec.Raw(msgspec.msgpack.encode(report.make(self, m.what, now)))
        self._send(peer, Report(m.tag, body))

    def _client_gone(self, now: float, client: Client) -> None:
        del self.clients[client.peer]
        for request in list(client.requests.values()):
            self.tasks.end(now, request, "cancelled", None)
        self.tasks.blocks.peer_gone(client.peer, client.arena, self._out)

    # --- comings and goings

    def _on_bye(self, now: float, peer: Peer, m: Bye) -> None:
        if (
            worker := self.workers.get(peer)
        ) is not None:  # it drains: takes nothing new, finishes what it has
            worker.draining = True
            self.tasks.stop_feeding(worker)
            self._send(peer, Drain())  # after this nothing more is under way to it
        elif (client := self.clients.get(peer)) is not None:
            self._client_gone(now, client)
        elif (guardian := self.guardians.get(peer)) is not None:
            self._guardian_gone(now, guardian, "its guardian has left")

    def _on_lost(self, now: float, peer: Peer) -> None:
        if (client := self.clients.get(peer)) is not None:
            self._client_gone(now, client)
        elif (guardian := self.guardians.get(peer)) is not None:
            self._guardian_gone(now, guardian, "its guardian is gone")
        elif (worker := self.workers.get(peer)) is not None and not worker.draining:
            # Messages to it were lost, so what it does now may be wrong: its tasks belong to somebody else.
            worker.draining = True
            self.tasks.stop_feeding(worker)
            self._send(worker.guardian.peer, Kill(peer, "killed: its connection to the broker broke"))

    def _on_tick(self, now: float) -> None:
        silence = now - self.settings.liveness_s
        for guardian in [g for g in self.guardians.values() if g.seen < silence]:
            self._guardian_gone(now, guardian, f"its guardian was silent for {self.settings.liveness_s:g} s")
        for client in [c for c in self.clients.values() if c.seen < silence]:
            self._note(
                f"{client.kind} was silent for {self.settings.liveness_s:g} s; its requests end",
                logging.WARNING,
            )
            self._client_gone(now, client)
        for peer in (*self.guardians, *self.clients):
            self._send(peer, Beat())  # tells them that the broker lives, and the shell whether they do
        self.tasks.expire(now)
        for worker in self.workers.values():
            self._check_time_limits(now, worker)

    def _check_time_limits(self, now: float, worker: Worker) -> None:
        limit = worker.stage.spec.retry.timeout_s
        for task in worker.tasks.values():
            if task.timed_out:
                continue
            if task.state is TaskState.CANCELLING:
                late, cause = (
                    now - task.stopped > self.settings.cancel_grace_s,
                    "killed: it did not stop a cancelled task",
                )
            else:
                late, cause = (
                    now - task.started > limit,
                    f"killed: an attempt passed its time limit of {limit:g} s",
                )
            if late:
                task.timed_out = True
                self._send(worker.guardian.peer, Kill(worker.peer, cause))


def _version_mismatch(who: str, version: int) -> str:
    return f"this broker speaks protocol version {VERSION}, the {who} {version}; install the same release"
