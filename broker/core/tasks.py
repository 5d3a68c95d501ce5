"""Requests and their tasks: admission, the flow of chunks, attempts, the end.

A chunk that a worker emits is numbered; the core takes each number of each task once, in order, whatever
attempt it comes from, so consumers and callers never see one twice and never miss one.
"""

from __future__ import annotations

import logging
from collections import Counter

import msgspec

from adapters.handle import Chunk
from broker.core.admission import BAD_HANDLE, admit, owns
from broker.core.blocks import Blocks
from broker.core.events import Instruction, Note, Send
from broker.core.lifecycle import TaskState
from broker.core.routes import BadRequest
from broker.core.state import (
    Client,
    Feed,
    PipelineState,
    Request,
    Task,
    Worker,
    failure,
)
from broker.protocol import (
    Accepted,
    Assign,
    Cancel,
    Checkpoint,
    EdgeInput,
    Emit,
    Ended,
    Error,
    Failed,
    Finish,
    Input,
    Output,
    Refused,
    Resume,
    Submit,
)
from pipelines.graph import Pipeline

NO_PARAMS = msgspec.Raw(b"\x80")  # an empty msgpack map


class Tasks:
    """All requests, the stages' queues, and the reference counts of the blocks they use."""

    def __init__(
        self, pipelines: list[Pipeline], *, entropy: int, first_request: int, refused: Counter[str]
    ) -> None:
        self.pipelines = {p.name: PipelineState(p) for p in pipelines}
        self.requests: dict[int, Request] = {}
        self.blocks = Blocks()
        self.out: list[Instruction] = []
        self.ended: Counter[tuple[str, str]] = Counter()  #: (pipeline, status) -> requests
        self._entropy = entropy
        self._next = first_request
        self._refused = refused
        self._now = 0.0

    # --- admission and the end

    def submit(self, now: float, client: Client, m: Submit) -> None:
        """A new request: accepted or refused at once."""
        self._now = now
        try:
            request = admit(
                m, client, self.pipelines, self.blocks, number=self._next, entropy=self._entropy, now=now
            )
        except BadRequest as error:
            kind = {429: "overloaded", 404: "not_found"}.get(error.status, "invalid_request_error")
            retry_after = 1.0 if error.status == 429 else None
            self.out.append(
                Send(
                    client.peer,
                    Refused(m.tag, Error(kind, str(error), error.status, error.param, retry_after)),
                )
            )
            return
        self._next += 1
        self.requests[request.number] = client.requests[m.tag] = request
        self.out.append(Send(client.peer, Accepted(m.tag, request.number)))
        for name, chunks in m.given.items():
            for slot in request.route.given[name]:
                feed = request.tasks[slot.stage].feeds[slot.position]
                feed.chunks, feed.closed = list(chunks), True
                for chunk in chunks:
                    self.blocks.retain(chunk.handles)
            for chunk in chunks:
                self.blocks.sweep(chunk.handles, self.out)
        for number in request.route.stages:
            self._queue_if_ready(request.tasks[number])

    def end(self, now: float, request: Request, status: str, error: Error | None) -> None:
        """The request is over: whatever still runs for it is told to stop, and its memory is let go."""
        self._now = now
        for task in request.tasks.values():
            self._leave(task)
        del self.requests[request.number], request.client.requests[request.tag]
        request.pipeline.unfinished -= 1
        self.ended[request.pipeline.name, status] += 1
        ended = Ended(request.tag, status, error, [task.timing for task in request.tasks.values()])  # type: ignore[arg-type]
        self.out.append(Send(request.client.peer, ended))
        if error is None:
            seconds = now - request.accepted
            line = Note(logging.DEBUG, "request %d of %s: %s after %.3f s", (*request.name, status, seconds))
        else:
            line = Note(logging.WARNING, "request %d of %s failed: %s", (*request.name, error.message))
        self.out.append(line)

    def _leave(self, task: Task) -> None:
        """Takes one task out of a request that ends."""
        if task.state is TaskState.DONE:
            return
        if task.state is TaskState.QUEUED:
            task.state = TaskState.DONE
            task.stage.scheduler.forget(task)
        elif task.state is TaskState.RUNNING and task.worker is not None:
            task.state = TaskState.CANCELLING
            request, stage = task.key
            self.out.append(Send(task.worker.peer, Cancel(request, stage, task.attempt)))
        else:
            task.state = TaskState.DONE
        self._ended_at(task)
        task.stopped = self._now
        task.stage.stats.cancelled += 1
        self._drop_inputs(task)

    def expire(self, now: float) -> None:
        """Ends the requests whose deadline has passed."""
        for request in [r for r in self.requests.values() if r.deadline is not None and r.deadline < now]:
            self.end(now, request, "failed", Error("timeout", "the request's deadline has passed", 504))

    # --- workers

    def worker_ready(self, now: float, worker: Worker, capacity: int) -> None:
        """A worker asks for its first tasks."""
        self._now = now
        scheduler = worker.stage.scheduler
        scheduler.add_credit(worker, capacity)
        scheduler.dispatch(self._assign)

    def _give_back(self, task: Task, worker: Worker) -> None:
        """A task leaves its worker, which so asks for another one."""
        del worker.tasks[task.key]
        if not worker.draining:
            worker.stage.scheduler.add_credit(worker, 1)

    def stop_feeding(self, worker: Worker) -> None:
        """The worker takes nothing new."""
        worker.stage.scheduler.remove(worker)

    def worker_gone(self, now: float, worker: Worker, cause: str) -> None:
        """Its tasks run again. Who is to blame is unknown when it held several: they run one by one then."""
        self._now = now
        scheduler = worker.stage.scheduler
        scheduler.remove(worker)
        self.blocks.peer_gone(worker.peer, worker.arena, self.out)
        tasks = [t for t in worker.tasks.values() if t.state is TaskState.RUNNING]
        culprits = [t for t in tasks if t.timed_out]
        worker.tasks.clear()
        for task in tasks:
            worker.stage.stats.deaths += 1
            if culprits and task not in culprits:
                self._again(task, None)
                continue
            task.solo = len(tasks) > 1 and not culprits
            kind, status = ("timeout", 504) if task.timed_out else ("worker_died", 500)
            self._again(
                task, failure(kind, f"stage {task.stage.name}: its worker died: {cause}", task, status)
            )
        scheduler.dispatch(self._assign)

    def _assign(self, task: Task, worker: Worker) -> None:
        request = task.request
        task.state = TaskState.RUNNING
        task.worker = worker
        task.attempt += 1
        task.started = self._now
        task.timing.started = self._now - request.accepted
        task.timed_out = False
        key = task.key
        worker.tasks[key] = task
        stats = task.stage.stats
        stats.wait.observe(self._now - task.queued)
        stats.attempts += 1
        inputs = []
        for feed in task.feeds:
            for chunk in feed.chunks:
                if chunk.handles:
                    self.blocks.hold(worker.peer, chunk.handles)
            inputs.append(EdgeInput(feed.edge, feed.chunks[:], feed.closed))
        resume = None
        if task.emitted or task.checkpoint is not None:
            if task.checkpoint is not None:
                self.blocks.hold(worker.peer, task.checkpoint.handles)
            bodies = [chunk.body for chunk in task.bodies]
            resume = Resume(task.emitted, bodies, task.checkpoint)
        params = request.params.get(task.stage.name, NO_PARAMS)
        message = Assign(key[0], key[1], task.attempt, params, request.seed, inputs, resume)
        self.out.append(Send(worker.peer, message))

    # --- what a task gives

    def _running(self, worker: Worker, m: Emit | Finish | Failed | Checkpoint) -> Task | None:
        """The task a worker speaks of, if it is the attempt that the worker holds a lease on."""
        task = worker.tasks.get((m.request, m.stage))
        if task is None or task.attempt != m.attempt:
            self._refused[f"stale:{type(m).__name__}"] += 1
            return None
        return task

    def emit(self, now: float, worker: Worker, m: Emit) -> None:
        """A chunk: kept for the consumers' later attempts, passed on to those that run, and to the caller."""
        self._now = now
        chunk = m.chunk
        task = self._running(worker, m)
        if chunk.handles and not self._take(worker, chunk, task):
            return
        if task is None:
            return
        if task.state is TaskState.RUNNING and chunk.seq == task.emitted:
            self._accept(task, worker, chunk)
        elif task.state is TaskState.RUNNING and chunk.seq > task.emitted:
            self.blocks.sweep(chunk.handles, self.out)
            self._blame(task, worker, f"sent chunk {chunk.seq} instead of {task.emitted}")
            return
        else:
            self._refused["repeated" if task.state is TaskState.RUNNING else "cancelled"] += 1
            self.blocks.sweep(chunk.handles, self.out)
        if chunk.last:
            self._done(task, worker)

    def _take(self, worker: Worker, chunk: Chunk, task: Task | None) -> bool:
        """Takes note of a chunk's blocks. A chunk with handles that can't be the worker's own is refused."""
        if not owns(worker.arena, chunk.handles) or not self.blocks.add(worker.peer, chunk.handles):
            self._refused["bad_handle"] += 1
            if task is not None and task.state is TaskState.RUNNING:
                self._blame(task, worker, BAD_HANDLE)
            return False
        if task is None:
            self.blocks.sweep(chunk.handles, self.out)
        return True

    def _accept(self, task: Task, worker: Worker, chunk: Chunk) -> None:
        request = task.request
        task.timing.last_chunk = self._now - request.accepted
        if task.emitted == 0:
            task.timing.first_chunk = task.timing.last_chunk
        task.emitted += 1
        task.stage.stats.chunks += 1
        if worker.resumes:
            task.bodies.append(chunk)
        route = request.route
        number = task.stage.number
        for slot in route.consumers[number]:
            consumer = request.tasks[slot.stage]
            self._feed(consumer, consumer.feeds[slot.position], chunk, closed=chunk.last)
        for output in route.outputs.get(number, ()):
            self.blocks.hold(request.client.peer, chunk.handles)
            self.out.append(Send(request.client.peer, Output(request.tag, output, chunk)))
        if chunk.handles:
            self.blocks.sweep(chunk.handles, self.out)

    def _feed(self, consumer: Task, feed: Feed, chunk: Chunk | None, *, closed: bool) -> None:
        """One more chunk (or just the end) for a task; a running one gets it right away."""
        if consumer.state is TaskState.DONE or consumer.state is TaskState.CANCELLING:
            return
        chunks = [] if chunk is None else [chunk]
        if chunk is not None:
            feed.chunks.append(chunk)
            self.blocks.retain(chunk.handles)
        feed.closed = closed
        if consumer.state is TaskState.RUNNING and consumer.worker is not None:
            if chunk is not None and chunk.handles:
                self.blocks.hold(consumer.worker.peer, chunk.handles)
            request, stage = consumer.key
            more = EdgeInput(feed.edge, chunks, closed)
            self.out.append(Send(consumer.worker.peer, Input(request, stage, consumer.attempt, more)))
        elif consumer.state is TaskState.WAITING:
            self._queue_if_ready(consumer)

    def checkpoint(self, now: float, worker: Worker, m: Checkpoint) -> None:
        """The engine's own state, for the next attempt; the one before is let go."""
        self._now = now
        task = self._running(worker, m)
        if m.chunk.handles and not self._take(worker, m.chunk, task):
            return
        if task is None:
            return
        if task.state is TaskState.RUNNING and m.chunk.seq == task.emitted:
            self.blocks.retain(m.chunk.handles)
            if task.checkpoint is not None:
                self.blocks.drop(task.checkpoint.handles, self.out)
            task.checkpoint = m.chunk
        else:
            self.blocks.sweep(m.chunk.handles, self.out)

    # --- how a task ends

    def finish(self, now: float, worker: Worker, m: Finish) -> None:
        """The task has given everything."""
        self._now = now
        task = self._running(worker, m)
        if task is not None:
            self._done(task, worker)

    def _done(self, task: Task, worker: Worker) -> None:
        self._give_back(task, worker)
        if task.state is TaskState.CANCELLING:
            task.state = TaskState.DONE
            worker.stage.scheduler.dispatch(self._assign)
            return
        task.state = TaskState.DONE
        task.worker = None
        self._ended_at(task)
        stats = task.stage.stats
        stats.service.observe(self._now - task.started)
        stats.done += 1
        self._drop_inputs(task)
        request = task.request
        for slot in request.route.consumers[task.stage.number]:
            consumer = request.tasks[slot.stage]
            feed = consumer.feeds[slot.position]
            if not feed.closed:
                self._feed(consumer, feed, None, closed=True)
        request.open -= 1
        if request.open == 0:
            self.end(self._now, request, "done", None)
        worker.stage.scheduler.dispatch(self._assign)

    def failed(self, now: float, worker: Worker, m: Failed) -> None:
        """The worker gives the task up: its item raised, the worker leaves, or it was told to stop."""
        self._now = now
        task = self._running(worker, m)
        if task is None:
            return
        self._give_back(task, worker)
        if task.state is TaskState.CANCELLING:
            task.state = TaskState.DONE
        elif m.kind == "item":
            error = m.error or Error("stage_failed", f"stage {task.stage.name} failed")
            error.stage, error.attempts = task.stage.name, task.attempt
            self._again(task, error)
        else:
            self._again(task, None)
        worker.stage.scheduler.dispatch(self._assign)

    def _blame(self, task: Task, worker: Worker, what: str) -> None:
        """The worker breaks the rules in this task: the attempt is over, what still comes of it is stale."""
        self._give_back(task, worker)
        request, stage = task.key
        self.out.append(Send(worker.peer, Cancel(request, stage, task.attempt)))
        self._again(task, failure("stage_failed", f"stage {task.stage.name}: its worker {what}", task))
        task.stage.scheduler.dispatch(self._assign)

    def _again(self, task: Task, error: Error | None) -> None:
        """Another attempt, if the error allows one. No error: nobody is to blame."""
        task.worker = None
        stats = task.stage.stats
        if error is not None:
            task.blame += 1
            if error.status < 500 or task.blame >= task.stage.spec.retry.attempts:
                task.state = TaskState.DONE
                self._ended_at(task)
                stats.failed += 1
                self._drop_inputs(task)
                self.end(self._now, task.request, "failed", error)
                return
        stats.redelivered += 1
        task.queued = self._now
        task.stage.scheduler.push(task)

    # --- small parts

    def _queue_if_ready(self, task: Task) -> None:
        if task.ready():
            task.queued = self._now
            task.timing.queued = self._now - task.request.accepted
            task.stage.scheduler.place(task, self._assign)

    def _ended_at(self, task: Task) -> None:
        timing = task.timing
        timing.ended = self._now - task.request.accepted
        timing.chunks, timing.attempts = task.emitted, task.attempt

    def _drop_inputs(self, task: Task) -> None:
        for feed in task.feeds:
            for chunk in feed.chunks:
                if chunk.handles:
                    self.blocks.drop(chunk.handles, self.out)
            feed.chunks = []
        if task.checkpoint is not None:
            self.blocks.drop(task.checkpoint.handles, self.out)
            task.checkpoint = None
        task.bodies = []
