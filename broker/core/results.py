"""What workers say of their tasks: chunks, checkpoints, ends.

It counts only while the worker holds the lease on that very attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adapters.handle import Chunk
from broker.core.admission import BAD_HANDLE, owns
from broker.core.lifecycle import TaskState
from broker.core.records import Finished
from broker.core.state import Task, Worker, failure
from broker.protocol import Checkpoint, Emit, Error, Failed, Finish, Message, Peer, Took

if TYPE_CHECKING:
    from broker.core.machine import Core

Handler = Callable[[float, Peer, Any], None]


class Results:
    """The handlers of these messages, which only a known worker may send."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._board = core.board
        self._tasks = core.tasks
        self.handlers: dict[type[Message], Handler] = {
            Emit: self._result(self._emit),
            Finish: self._result(self._finish),
            Failed: self._result(self._failed),
            Checkpoint: self._result(self._checkpoint),
            Took: self._on_took,
        }

    def _result(self, act: Callable[[Worker, Any], None]) -> Handler:
        """A handler for what a worker keeps until it hears that we have seen it."""
        core = self._core

        def handle(now: float, peer: Peer, m: Message) -> None:
            worker = core.workers.get(peer)
            if worker is None:
                core.stranger(peer, m)
            elif not worker.broken:
                worker.results += 1
                act(worker, m)

        return handle

    def _on_took(self, now: float, peer: Peer, m: Took) -> None:
        worker = self._core.workers.get(peer)
        if worker is not None:
            self._took(worker, m)

    def _emit(self, worker: Worker, m: Emit) -> None:
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
            self._tasks.flow.keep(task, chunk)
            if task.stage.scheduler.testing:
                task.stage.scheduler.dispatch(self._tasks.assign)
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
            self._tasks.discard(name)
        else:
            task.request.note_files(chunk.handles)
        return True

    def _checkpoint(self, worker: Worker, m: Checkpoint) -> None:
        """The engine's own state, for the next attempt; the one before is let go."""
        task = self._running(worker, m)
        if any(self._board.blocks.known(handle) for handle in m.chunk.handles):
            return  # a worker that introduces itself again repeats it
        if m.chunk.handles and not self._take(worker, m.chunk, task, repeated=False):
            return
        if task is None:
            return
        if task.state is TaskState.RUNNING and m.chunk.seq == task.emitted:
            self._tasks.mark(task, m.chunk)
        else:
            self._board.blocks.sweep(m.chunk.handles, self._board.out)

    def _took(self, worker: Worker, m: Took) -> None:
        """The job has taken more of its inputs."""
        task = self._running(worker, m)
        if task is not None and task.state is TaskState.RUNNING:
            self._tasks.flow.took(task, m.edge, m.chunks)

    def _finish(self, worker: Worker, m: Finish) -> None:
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

    def _failed(self, worker: Worker, m: Failed) -> None:
        """The worker gives the task up: its item raised, the worker leaves, or it was told to stop."""
        task = self._running(worker, m)
        if task is None:
            return
        self._tasks.give_back(task, worker)
        if task.state is TaskState.CANCELLING:
            self._tasks.off(task)
        elif m.kind == "item":
            error = m.error or Error("stage_failed", f"stage {task.stage.name} failed")
            error.stage, error.attempts = task.stage.name, task.attempt
            self._tasks.again(task, error)
        else:
            self._tasks.again(task, None)
        worker.stage.scheduler.dispatch(self._tasks.assign)

    def _done(self, task: Task, worker: Worker) -> None:
        self._tasks.give_back(task, worker)
        if task.state is TaskState.CANCELLING:
            self._tasks.off(task)
        else:
            now = self._board.now
            task.stage.stats.finished(now, now - task.started, waiting=task.stage.scheduler.length)
            self._tasks.done(task)
        worker.stage.scheduler.dispatch(self._tasks.assign)

    def _blame(self, task: Task, worker: Worker, what: str, *, over: bool) -> None:
        """The worker breaks the rules in this task: the attempt is over, what still comes of it is stale.

        ``over``: the worker has ended it by itself.
        """
        self._tasks.give_back(task, worker)
        if not over:
            self._tasks.stop(worker, (*task.key, task.attempt))
        self._tasks.again(task, failure("stage_failed", f"stage {task.stage.name}: its worker {what}", task))
        task.stage.scheduler.dispatch(self._tasks.assign)

    def _running(self, worker: Worker, m: Emit | Finish | Failed | Checkpoint | Took) -> Task | None:
        """The task a worker speaks of, if it is the attempt that the worker holds a lease on."""
        task = worker.tasks.get((m.request, m.stage))
        if task is None or task.attempt != m.attempt:
            self._board.refused[f"stale:{type(m).__name__}"] += 1
            if worker.strays and (type(m) in (Finish, Failed) or (type(m) is Emit and m.chunk.last)):
                worker.strays.pop((m.request, m.stage, m.attempt), None)
            return None
        return task


def _folder(chunk: Chunk) -> str:
    """The folder of the disk store that a chunk's tensors are in, or have their copies in."""
    for handle in chunk.handles:
        if handle.file:
            return handle.file.partition("/")[0]
    return ""
