"""Tasks and their attempts: queued, leased to a worker, tried again, done."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from adapters.handle import Chunk
from broker.core.board import Board
from broker.core.events import Discard
from broker.core.flow import Flow
from broker.core.lifecycle import TaskState
from broker.core.records import Again, Leased, Marked
from broker.core.state import Request, Task, Worker, failure
from broker.protocol import (
    Assign,
    Cancel,
    EdgeInput,
    Error,
    Kill,
    Lease,
    Resume,
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
        scheduler.dispatch(self.assign)

    def give_back(self, task: Task, worker: Worker) -> None:
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
        of them it was: they are tried one by one. It may also have been one that was cancelled, and does not
        run again. ``innocent``: none of them can have done it.
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
        others = [t for t in tasks if t.state is TaskState.CANCELLING and (t.timed_out or not t.proved)]
        for task in tasks:
            if task.state is TaskState.CANCELLING:
                self.off(task)
        suspects = [t for t in running if t.timed_out] or [t for t in running if not t.proved]
        if innocent or worker.broken:
            suspects = []
        alone = len(suspects) == 1 and not others and not worker.strays
        worker.stage.stats.deaths += len(running)
        for task in running:
            if task not in suspects:
                self.again(task, None)
            elif not alone and not task.timed_out:
                task.solo = True
                self.again(task, None)
            else:
                kind, status = ("timeout", 504) if task.timed_out else ("worker_died", 500)
                message = f"stage {task.stage.name}: its worker died: {cause}"
                self.again(task, failure(kind, message, task, status))
        scheduler.dispatch(self.assign)

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
                    self.off(task)
            elif lease is None:
                del worker.tasks[task.key]
                self.again(task, None)  # the assignment was lost on its way
            elif not self._catch_up(task, worker, lease):
                del worker.tasks[task.key]
                self.stop(worker, (*task.key, task.attempt))
                self.again(task, failure("worker_died", f"stage {task.stage.name}: {_gone(task)}", task))
        for attempt in announced:
            self.stop(worker, attempt)

    def stop(self, worker: Worker, attempt: tuple[int, int, int]) -> None:
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
            task.stage.scheduler.place(task, self.assign)

    def assign(self, task: Task, worker: Worker) -> None:
        """Begins an attempt on this worker."""
        board = self._board
        task.attempt += 1
        self.lease(task, worker)
        board.log.add(task.request.number, Leased(task.stage.number, task.attempt, worker.peer, board.now))
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
            number,
            stage,
            task.attempt,
            params,
            request.seed,
            inputs,
            resume,
            request.name,
            task.granted,
            [slot.stage for slot in request.route.consumers[stage]],
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

    def again(self, task: Task, error: Error | None) -> None:
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

    # --- time

    def check_time_limits(self, worker: Worker, grace_s: float) -> None:
        """Has a worker killed that runs an attempt, or keeps one that was cancelled, for too long."""
        now, limit = self._board.now, worker.stage.spec.retry.timeout_s
        if worker.strays and not worker.doomed and min(worker.strays.values()) < now - grace_s:
            self.kill(worker, "killed: it did not stop a cancelled task")
        for task in worker.tasks.values():
            if task.timed_out:
                continue
            if task.state is TaskState.CANCELLING:
                late, cause = now - task.stopped > grace_s, "killed: it did not stop a cancelled task"
            else:
                late = now - task.started > limit
                cause = f"killed: an attempt passed its time limit of {limit:g} s"
            if late:
                task.timed_out = True
                self.kill(worker, cause)

    def kill(self, worker: Worker, cause: str) -> None:
        """Tells its guardian to; again with each sign of the guardian, which may not have been there."""
        worker.doomed = cause
        self._board.send(worker.guardian.peer, Kill(worker.peer, cause))

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

    def off(self, task: Task) -> None:
        """A cancelled task has left its worker, which may have written files since the end of its request."""
        task.state = TaskState.DONE
        task.worker = None
        request = task.request
        if request.files or request.pipeline.durable:
            self.discard(request.name)

    def discard(self, name: str) -> None:
        """What is still written for a request that is gone goes too."""
        if name and name not in self._board.names:
            self._board.out.append(Discard(name))

    def ended_at(self, task: Task) -> None:
        """Notes when the task ended."""
        timing = task.timing
        timing.ended = self._board.now - task.request.accepted
        timing.chunks, timing.attempts = task.emitted, task.attempt


def _gone(task: Task) -> str:
    edges = task.request.pipeline.spec.edges
    kept = [f"{edges[feed.edge].from_} -> {task.stage.name}" for feed in task.feeds if feed.gone]
    return f"its worker is gone, and {', '.join(kept)} keeps nothing (checkpoint: none)"
