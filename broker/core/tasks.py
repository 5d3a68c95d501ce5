"""Tasks and their attempts: queued, leased to a worker, tried again, done.

A worker's messages about an attempt count only while it holds the lease on that attempt.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from adapters.handle import Chunk
from broker.core.admission import BAD_HANDLE, owns
from broker.core.board import Board
from broker.core.events import Discard
from broker.core.flow import Flow
from broker.core.lifecycle import TaskState
from broker.core.records import Again, Finished, Leased, Marked
from broker.core.state import Request, Task, Worker, failure
from broker.protocol import (
    Assign,
    Cancel,
    Checkpoint,
    EdgeInput,
    Emit,
    Error,
    Failed,
    Finish,
    Lease,
    Resume,
    Took,
)

FAR = 20  #: times the attempts of a stage: so many may break off without anybody's blame
NO_PARAMS = msgspec.Raw(b"\x80")  # an empty msgpack map

End = Callable[[Request, str, Error | None, bool], None]


class Tasks:
    """All tasks. ``end`` is called with (request, status, error, exhausted) for a request that is over."""

    def __init__(self, board: Board, end: End) -> None:
        self._board = board
        self._end = end
        self.flow = Flow(board, self.queue_if_ready)

    # --- workers

    def worker_ready(self, worker: Worker, credit: int) -> None:
        """A worker asks for its first tasks."""
        scheduler = worker.stage.scheduler
        if credit > 0:
            scheduler.add_credit(worker, credit)
        scheduler.dispatch(self._assign)

    def _give_back(self, task: Task, worker: Worker) -> None:
        """A task leaves its worker, which so asks for another one."""
        del worker.tasks[task.key]
        self.flow.forget_limit(task)
        if not worker.draining and not worker.ghost:
            worker.stage.scheduler.add_credit(worker, 1)

    def stop_feeding(self, worker: Worker) -> None:
        """The worker takes nothing new."""
        worker.stage.scheduler.remove(worker)

    def worker_gone(self, worker: Worker, cause: str, *, innocent: bool) -> None:
        """Its tasks run again.

        Suspected are those that had given nothing in this attempt. If there are several, nobody knows which
        of them it was: they are tried one by one. ``innocent``: none of them can have done it.
        """
        board = self._board
        scheduler = worker.stage.scheduler
        scheduler.remove(worker)
        board.blocks.peer_gone(worker.peer, worker.arena, board.out)
        tasks = list(worker.tasks.values())
        worker.tasks.clear()
        for task in tasks:
            task.request.files = True  # it may have written some that we never heard of
        running = [t for t in tasks if t.state is TaskState.RUNNING]
        for task in tasks:
            if task.state is TaskState.CANCELLING:
                self._off(task)
        suspects = [t for t in running if t.timed_out] or [t for t in running if not t.proved]
        if innocent:
            suspects = []
        worker.stage.stats.deaths += len(running)
        for task in running:
            if task not in suspects:
                self._again(task, None)
            elif len(suspects) > 1 and not task.timed_out:
                task.solo = True
                self._again(task, None)
            else:
                kind, status = ("timeout", 504) if task.timed_out else ("worker_died", 500)
                message = f"stage {task.stage.name}: its worker died: {cause}"
                self._again(task, failure(kind, message, task, status))
        scheduler.dispatch(self._assign)

    def adopt(self, worker: Worker, leases: list[Lease]) -> None:
        """A worker that we know from the journal says what it runs: what it lacks is sent, the rest ends."""
        announced = {(lease.request, lease.stage, lease.attempt): lease for lease in leases}
        for task in list(worker.tasks.values()):
            lease = announced.pop((*task.key, task.attempt), None)
            if task.state is TaskState.CANCELLING:
                if lease is not None:
                    self._board.send(worker.peer, Cancel(*task.key, task.attempt))
                else:
                    del worker.tasks[task.key]
                    self._off(task)
            elif lease is None:
                del worker.tasks[task.key]
                self._again(task, None)  # the assignment was lost on its way
            elif not self._catch_up(task, worker, lease):
                del worker.tasks[task.key]
                self._stop(worker, (*task.key, task.attempt))
                self._again(task, failure("worker_died", f"stage {task.stage.name}: {_gone(task)}", task))
        for attempt in announced:
            self._stop(worker, attempt)

    def _stop(self, worker: Worker, attempt: tuple[int, int, int]) -> None:
        """The worker is to stop an attempt that is its task no more."""
        worker.strays[attempt] = self._board.now
        self._board.send(worker.peer, Cancel(*attempt))

    def _catch_up(self, task: Task, worker: Worker, lease: Lease) -> bool:
        """Sends the inputs that were lost on their way. False: they are not kept."""
        received = {edge: (count, closed) for edge, count, closed in lease.inputs}
        for feed in task.feeds:
            count, closed = received.get(feed.edge, (0, False))
            if feed.gauge is not None:
                feed.gauge.begin(count)
                if feed.gauge.take(0) and feed.producer is not None:  # its producer may have spoken before us
                    self.flow.regrant(task.request.tasks[feed.producer])
            if count < feed.gone:
                return False
            chunks = feed.chunks[count - feed.gone :]
            if chunks or feed.closed != closed:
                for chunk in chunks:
                    self._board.blocks.hold(worker.peer, chunk.handles)
                self.flow.send_inputs(task, feed, chunks)
        self.forget_delivered(task)
        task.granted = (0, 0)
        self.flow.regrant(task)
        return True

    # --- attempts

    def queue_if_ready(self, task: Task) -> None:
        """Queues a waiting task that a worker could begin."""
        if task.ready():
            task.queued = self._board.now
            task.timing.queued = task.queued - task.request.accepted
            task.stage.scheduler.place(task, self._assign)

    def _assign(self, task: Task, worker: Worker) -> None:
        board = self._board
        task.attempt += 1
        self.lease(task, worker)
        board.log.add(task.request.number, Leased(task.stage.number, task.attempt, worker.peer))
        stats = task.stage.stats
        stats.wait.observe(board.now - task.queued)
        stats.attempts += 1
        inputs = []
        for feed in task.feeds:
            for chunk in feed.chunks:
                if chunk.handles:
                    board.blocks.hold(worker.peer, chunk.handles)
            inputs.append(EdgeInput(feed.edge, feed.chunks[:], feed.closed))
        resume = None
        if task.emitted or task.checkpoint is not None:
            if task.checkpoint is not None:
                board.blocks.hold(worker.peer, task.checkpoint.handles)
            resume = Resume(task.emitted, [chunk.body for chunk in task.bodies], task.checkpoint)
        self.flow.grant(task)
        self.forget_delivered(task)
        request = task.request
        params = request.submit.params.get(task.stage.name, NO_PARAMS)
        number, stage = task.key
        message = Assign(
            number, stage, task.attempt, params, request.seed, inputs, resume, request.name, task.granted
        )
        board.send(worker.peer, message)

    def lease(self, task: Task, worker: Worker) -> None:
        """The worker has the task's present attempt."""
        now = self._board.now
        task.state = TaskState.RUNNING
        task.worker = worker
        task.started = task.last = now
        task.timing.started = now - task.request.accepted
        task.timed_out = task.proved = False
        task.nbytes = 0
        worker.tasks[task.key] = task
        for feed in task.feeds:
            if feed.gauge is not None:
                feed.gauge.begin()

    def forget_delivered(self, task: Task) -> None:
        """Edges with `checkpoint: none` keep nothing that a worker has."""
        for feed in task.feeds:
            if feed.forgets and feed.chunks:
                for chunk in feed.chunks:
                    self._board.blocks.drop(chunk.handles, self._board.out)
                feed.gone += len(feed.chunks)
                feed.chunks = []

    def _again(self, task: Task, error: Error | None) -> None:
        """Another attempt, if the error allows one. No error: nobody is to blame."""
        board = self._board
        now = board.now
        task.worker = None
        self.flow.forget_limit(task)
        stats = task.stage.stats
        stats.busy_s += now - task.started
        stats.lost_s += now - task.last
        stats.lost_chunks += 1
        if error is not None:
            task.blame += 1
        attempts = task.stage.spec.retry.attempts
        exhausted = task.blame >= attempts
        if error is None and task.attempt >= attempts * FAR:  # whoever is to blame, it must end some time
            error = failure(
                "worker_died", f"stage {task.stage.name}: {task.attempt} attempts broke off", task
            )
            exhausted = True
        gone = any(feed.gone for feed in task.feeds)
        if gone and error is None:
            error = failure("worker_died", f"stage {task.stage.name}: {_gone(task)}", task)
        if error is not None and (error.status < 500 or exhausted or gone):
            task.state = TaskState.DONE
            self.ended_at(task)
            stats.failed += 1
            self.flow.drop_inputs(task)
            self._end(task.request, "failed", error, error.status >= 500)
            return
        stats.redelivered += 1
        board.log.add(task.request.number, Again(task.stage.number, task.blame, task.solo))
        task.queued = now
        task.stage.scheduler.push(task)

    def _blame(self, task: Task, worker: Worker, what: str, *, over: bool) -> None:
        """The worker breaks the rules in this task: the attempt is over, what still comes of it is stale.

        ``over``: the worker has ended it by itself.
        """
        self._give_back(task, worker)
        if not over:
            self._stop(worker, (*task.key, task.attempt))
        self._again(task, failure("stage_failed", f"stage {task.stage.name}: its worker {what}", task))
        task.stage.scheduler.dispatch(self._assign)

    # --- what a worker says

    def _running(self, worker: Worker, m: Emit | Finish | Failed | Checkpoint | Took) -> Task | None:
        """The task a worker speaks of, if it is the attempt that the worker holds a lease on."""
        task = worker.tasks.get((m.request, m.stage))
        if task is None or task.attempt != m.attempt:
            self._board.refused[f"stale:{type(m).__name__}"] += 1
            if worker.strays and (type(m) in (Finish, Failed) or (type(m) is Emit and m.chunk.last)):
                worker.strays.pop((m.request, m.stage, m.attempt), None)
            return None
        return task

    def emit(self, worker: Worker, m: Emit) -> None:
        """A chunk."""
        chunk = m.chunk
        task = self._running(worker, m)
        running = task is not None and task.state is TaskState.RUNNING
        fresh = task is not None and running and chunk.seq == task.emitted
        if chunk.handles and not self._take(worker, chunk, task, repeated=not fresh):
            if task is not None and task.state is TaskState.CANCELLING and chunk.last:
                self._done(task, worker)
            return
        if task is None:
            return
        if fresh:
            self.flow.keep(task, chunk)
            if task.stage.scheduler.testing:
                task.stage.scheduler.dispatch(self._assign)
        elif running and chunk.seq > task.emitted:
            self._board.blocks.sweep(chunk.handles, self._board.out)
            self._blame(task, worker, f"sent chunk {chunk.seq} instead of {task.emitted}", over=chunk.last)
            return
        else:
            self._board.refused["repeated" if running else "cancelled"] += 1
            self._board.blocks.sweep(chunk.handles, self._board.out)
        if chunk.last:
            self._done(task, worker)

    def _take(self, worker: Worker, chunk: Chunk, task: Task | None, *, repeated: bool) -> bool:
        """Takes note of a chunk's blocks. A chunk with handles that can't be the worker's own is refused.

        A worker that introduces itself again repeats chunks: their blocks are known, or were freed.
        """
        board = self._board
        name = task.request.name if task is not None else _folder(chunk)
        if repeated and any(board.blocks.known(handle) for handle in chunk.handles):
            return True
        lies = sum(handle.nbytes for handle in chunk.handles) > board.most_bytes
        lies = lies or not owns(worker.arena, name, chunk.handles)
        if lies or not board.blocks.add(worker.peer, chunk.handles):
            board.refused["bad_handle"] += 1
            if task is not None and task.state is TaskState.RUNNING:
                self._blame(task, worker, BAD_HANDLE, over=chunk.last)
            return False
        if task is None:
            board.blocks.sweep(chunk.handles, board.out)
            self._discard(name)
        else:
            task.request.note_files(chunk.handles)
        return True

    def checkpoint(self, worker: Worker, m: Checkpoint) -> None:
        """The engine's own state, for the next attempt; the one before is let go."""
        task = self._running(worker, m)
        if any(self._board.blocks.known(handle) for handle in m.chunk.handles):
            return  # a worker that introduces itself again repeats it
        if m.chunk.handles and not self._take(worker, m.chunk, task, repeated=False):
            return
        if task is None:
            return
        if task.state is TaskState.RUNNING and m.chunk.seq == task.emitted:
            self.mark(task, m.chunk)
        else:
            self._board.blocks.sweep(m.chunk.handles, self._board.out)

    def mark(self, task: Task, chunk: Chunk) -> None:
        """Keeps a checkpoint."""
        board = self._board
        board.log.add(task.request.number, Marked(task.stage.number, chunk))
        board.blocks.retain(chunk.handles)
        task.request.note_files(chunk.handles)
        if task.checkpoint is not None:
            board.blocks.drop(task.checkpoint.handles, board.out)
        task.checkpoint = chunk
        task.last = board.now
        task.proved, task.solo = True, False

    def took(self, worker: Worker, m: Took) -> None:
        """The job has taken more of its inputs."""
        task = self._running(worker, m)
        if task is not None and task.state is TaskState.RUNNING:
            self.flow.took(task, m.edge, m.chunks)

    def finish(self, worker: Worker, m: Finish) -> None:
        """The task has given everything."""
        task = self._running(worker, m)
        if task is None:
            return
        if task.state is TaskState.RUNNING:
            if m.chunks not in (-1, task.emitted):  # some were lost with a connection
                self._blame(task, worker, f"sent {m.chunks} chunks, of which {task.emitted} came", over=True)
                return
            # Where a last chunk ends a task, that says so.
            self._board.log.add(task.request.number, Finished(task.stage.number))
        self._done(task, worker)

    def _done(self, task: Task, worker: Worker) -> None:
        self._give_back(task, worker)
        if task.state is TaskState.CANCELLING:
            self._off(task)
        else:
            now = self._board.now
            task.stage.stats.finished(now, now - task.started, waiting=task.stage.scheduler.length)
            self.done(task)
        worker.stage.scheduler.dispatch(self._assign)

    def done(self, task: Task) -> None:
        """The task is done; with the last one the request is."""
        board = self._board
        request = task.request
        task.state = TaskState.DONE
        task.worker = None
        request.progress = task.stage.progress = board.now
        self.ended_at(task)
        self.flow.drop_inputs(task)
        self.flow.end_of(task)
        request.open -= 1
        if request.open == 0:
            self._end(request, "done", None, False)

    def failed(self, worker: Worker, m: Failed) -> None:
        """The worker gives the task up: its item raised, the worker leaves, or it was told to stop."""
        task = self._running(worker, m)
        if task is None:
            return
        self._give_back(task, worker)
        if task.state is TaskState.CANCELLING:
            self._off(task)
        elif m.kind == "item":
            error = m.error or Error("stage_failed", f"stage {task.stage.name} failed")
            error.stage, error.attempts = task.stage.name, task.attempt
            self._again(task, error)
        else:
            self._again(task, None)
        worker.stage.scheduler.dispatch(self._assign)

    # --- a request's end

    def leave(self, task: Task) -> None:
        """Takes one task out of a request that ends."""
        if task.state is TaskState.DONE:
            return
        if task.state is TaskState.QUEUED:
            task.state = TaskState.DONE
            task.stage.scheduler.forget(task)
        elif task.state is TaskState.RUNNING and task.worker is not None:
            task.state = TaskState.CANCELLING
            self._board.send(task.worker.peer, Cancel(*task.key, task.attempt))
        else:
            task.state = TaskState.DONE
        self.ended_at(task)
        task.stopped = self._board.now
        task.stage.stats.cancelled += 1
        self.flow.drop_inputs(task)

    def _off(self, task: Task) -> None:
        """A cancelled task has left its worker, which may have written files since the end of its request."""
        task.state = TaskState.DONE
        task.worker = None
        request = task.request
        if request.files or request.pipeline.durable:
            self._discard(request.name)

    def _discard(self, name: str) -> None:
        if name and name not in self._board.names:
            self._board.out.append(Discard(name))

    def ended_at(self, task: Task) -> None:
        """Notes when the task ended."""
        timing = task.timing
        timing.ended = self._board.now - task.request.accepted
        timing.chunks, timing.attempts = task.emitted, task.attempt


def _folder(chunk: Chunk) -> str:
    """The folder of the disk store that a chunk's tensors are in, or have their copies in."""
    for handle in chunk.handles:
        if handle.file:
            return handle.file.partition("/")[0]
    return ""


def _gone(task: Task) -> str:
    edges = task.request.pipeline.spec.edges
    kept = [f"{edges[feed.edge].from_} -> {task.stage.name}" for feed in task.feeds if feed.gone]
    return f"its worker is gone, and {', '.join(kept)} keeps nothing (checkpoint: none)"
