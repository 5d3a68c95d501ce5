"""The flow of chunks: from a task to the tasks that consume it and to the caller, kept for later attempts.

A chunk that a worker emits is numbered; each number of each task is taken once, in order, whatever attempt
it comes from, so consumers and callers never see one twice and never miss one.
"""

from __future__ import annotations

from collections.abc import Callable

from adapters.handle import Chunk, size_of
from broker.core import ahead
from broker.core.ahead import Gauge
from broker.core.board import Board
from broker.core.lifecycle import TaskState
from broker.core.records import Kept
from broker.core.state import Feed, Request, Task
from broker.protocol import EdgeInput, Grant, Input, Output

STANDSTILL_S = 1.0  #: a request in which nothing moves for so long may be waiting for itself
OTHERS_S = 2.0  #: and so long for a stage whose workers are busy with other requests


class Flow:
    """Moves chunks. ``queue`` is called for a task that may have become ready to run."""

    def __init__(self, board: Board, queue: Callable[[Task], None]) -> None:
        self._board = board
        self._queue = queue
        self._limited: dict[Task, None] = {}  #: running tasks that have gone as far as they may

    # --- a chunk's way

    def keep(self, task: Task, chunk: Chunk) -> None:
        """Takes a task's next chunk: to its consumers and to the caller, kept for those that run later."""
        board = self._board
        request, worker = task.request, task.worker
        board.log.add(request.number, Kept(task.stage.number, chunk))
        now = request.progress = task.stage.progress = task.last = board.now
        task.timing.last_chunk = now - request.accepted
        if task.emitted == 0:
            task.timing.first_chunk = task.timing.last_chunk
        task.emitted += 1
        task.proved, task.solo = True, False
        task.stage.stats.chunks += 1
        if worker is None or worker.resumes or worker.ghost:
            task.bodies.append(chunk)
        route = request.route
        number = task.stage.number
        if not chunk.last and number in route.paced:  # nobody is slowed by what is the last
            self._measure(task, chunk)
        for slot in route.consumers[number]:
            consumer = request.tasks[slot.stage]
            self.feed(consumer, consumer.feeds[slot.position], chunk, closed=chunk.last)
        for output in route.outputs.get(number, ()):
            self._output(request, output, chunk)
        if chunk.handles:
            request.note_files(chunk.handles)
            board.blocks.sweep(chunk.handles, board.out)

    def _measure(self, task: Task, chunk: Chunk) -> None:
        size = size_of(chunk)
        task.nbytes += size
        for gauge in task.gauges or self._make_gauges(task):
            if gauge.open:
                gauge.add(size)
        if task.emitted >= task.granted[0] or task.nbytes >= task.granted[1]:
            self._limited[task] = None

    def _make_gauges(self, task: Task) -> list[Gauge]:
        """Connects a task that gives more than one chunk with those whose pace it must keep to."""
        request, number = task.request, task.stage.number
        gauges = task.gauges = []
        for slot in request.route.consumers[number]:
            consumer = request.tasks[slot.stage]
            feed = consumer.feeds[slot.position]
            if feed.stream:
                wants = consumer.state is not TaskState.DONE and consumer.state is not TaskState.CANCELLING
                feed.gauge = Gauge(open=wants)
                gauges.append(feed.gauge)
        for output in request.route.outputs.get(number, ()):
            request.gauges[output] = Gauge(open=request.client is not None)
            gauges.append(request.gauges[output])
        if not all(gauge.open for gauge in gauges):
            self.regrant(task)
        return gauges

    def feed(self, consumer: Task, feed: Feed, chunk: Chunk | None, *, closed: bool) -> None:
        """One more chunk (or just the end) for a task; a running one gets it right away."""
        if consumer.state is TaskState.DONE or consumer.state is TaskState.CANCELLING:
            return
        board = self._board
        worker = consumer.worker
        running = consumer.state is TaskState.RUNNING and worker is not None and not worker.ghost
        if chunk is not None:
            if feed.forgets and running:
                feed.gone += 1
            else:
                feed.chunks.append(chunk)
                if chunk.handles:
                    board.blocks.retain(chunk.handles)
        feed.closed = closed
        if running:
            assert worker is not None
            if chunk is not None and chunk.handles:
                board.blocks.hold(worker.peer, chunk.handles)
            self.send_inputs(consumer, feed, [] if chunk is None else [chunk])
        elif consumer.state is TaskState.WAITING:
            self._queue(consumer)

    def send_inputs(self, consumer: Task, feed: Feed, chunks: list[Chunk]) -> None:
        """Passes the last of what came over one edge on to the worker that runs the consumer."""
        assert consumer.worker is not None
        request, stage = consumer.key
        more = EdgeInput(feed.edge, chunks, feed.closed)
        first = feed.gone + len(feed.chunks) - len(chunks)
        self._board.send(consumer.worker.peer, Input(request, stage, consumer.attempt, more, first))

    def _output(self, request: Request, output: str, chunk: Chunk) -> None:
        if request.keeps:
            request.outputs.append((output, chunk))
            self._board.blocks.retain(chunk.handles)
        if request.listener is not None:
            self._send_output(request, output, chunk)

    def _send_output(self, request: Request, output: str, chunk: Chunk) -> None:
        assert request.client is not None
        if chunk.handles:
            self._board.blocks.hold(request.client.peer, chunk.handles)
        self._board.send(request.client.peer, Output(request.tag, output, chunk))

    def resend(self, request: Request, received: dict[str, int]) -> None:
        """To a client that has come (back): what it lacks of the outputs, in their order."""
        for output, gauge in request.gauges.items():
            gauge.taken, gauge.open = received.get(output, 0), True
            gauge.begin(gauge.taken)
            gauge.clear()
        for output, chunk in request.outputs:
            if chunk.seq >= received.get(output, 0):
                if (gauge := request.gauges.get(output)) is not None:  # type: ignore[assignment]
                    gauge.add(size_of(chunk))
                self._send_output(request, output, chunk)
        for task in request.tasks.values():
            self.regrant(task)  # what it has received it has taken, and need not say so

    def nobody_waits(self, request: Request) -> None:
        """The caller has gone: nothing waits for it to take its outputs."""
        for gauge in request.gauges.values():
            gauge.open = False
        for task in request.tasks.values():
            self.regrant(task)

    def end_of(self, task: Task) -> None:
        """A task is done: its consumers learn that nothing more will come."""
        request = task.request
        for slot in request.route.consumers[task.stage.number]:
            consumer = request.tasks[slot.stage]
            feed = consumer.feeds[slot.position]
            if not feed.closed:
                self.feed(consumer, feed, None, closed=True)

    def drop_inputs(self, task: Task) -> None:
        """A task needs its inputs no more; its producers need not wait for it."""
        blocks, out = self._board.blocks, self._board.out
        self._limited.pop(task, None)
        for feed in task.feeds:
            for chunk in feed.chunks:
                if chunk.handles:
                    blocks.drop(chunk.handles, out)
            feed.chunks = []
            if feed.gauge is not None and feed.gauge.open:
                feed.gauge.open = False
                if feed.stream and feed.producer is not None and not feed.closed:
                    self.regrant(task.request.tasks[feed.producer])
        if task.checkpoint is not None:
            blocks.drop(task.checkpoint.handles, out)
            task.checkpoint = None
        task.bodies = []

    # --- how far a task may be ahead

    def took(self, task: Task, edge: int, chunks: int) -> None:
        """A job has taken more from one of its edges."""
        for feed in task.feeds:
            if feed.edge != edge or feed.gauge is None or feed.producer is None:
                continue
            if feed.gauge.take(chunks):
                self.regrant(task.request.tasks[feed.producer])

    def taken(self, request: Request, output: str, chunks: int) -> None:
        """The caller has taken more of an output."""
        gauge = request.gauges.get(output)
        if gauge is not None and gauge.take(chunks):
            stage = request.pipeline.router.order.index(request.pipeline.spec.outputs[output])
            self.regrant(request.tasks[stage])

    def grant(self, task: Task) -> None:
        """Says how far a new attempt may go."""
        request = task.request
        if task.gauges is None:
            paced = task.stage.number in request.route.paced
            task.granted = request.pipeline.first_grant if paced else ahead.UNLIMITED
            return
        task.granted = ahead.granted(task.gauges, request.pipeline.spec.limits, task.boost, 0)
        if task.emitted >= task.granted[0] or task.granted[1] <= 0:
            self._limited[task] = None

    def regrant(self, task: Task) -> None:
        """Lets a running task go further, if it may now."""
        worker = task.worker
        if task.state is not TaskState.RUNNING or worker is None or worker.ghost or not task.gauges:
            return
        limits = task.request.pipeline.spec.limits
        now = ahead.granted(task.gauges, limits, task.boost, task.nbytes)
        new = max(now[0], task.granted[0]), max(now[1], task.granted[1])
        if new == task.granted:
            return
        task.granted = new
        if task.emitted < new[0] and task.nbytes < new[1]:
            self._limited.pop(task, None)
        request, stage = task.key
        self._board.send(worker.peer, Grant(request, stage, task.attempt, *new))

    def forget_limit(self, task: Task) -> None:
        """The task runs no more, for now."""
        self._limited.pop(task, None)

    def unlock(self) -> None:
        """Lets tasks go further that wait for a consumer that, in the end, waits for them.

        Bounded buffers can make a graph stand still that would flow with larger ones (Parks 1995); where
        nothing moves, and nobody is merely slow, the limits of that task are doubled.
        """
        now = self._board.now
        for task in list(self._limited):
            request = task.request
            if now - request.progress > STANDSTILL_S and self._stands_still(request):
                task.boost *= 2
                self.regrant(task)

    def _stands_still(self, request: Request) -> bool:
        limits = request.pipeline.spec.limits
        if any(gauge.open and gauge.behind(limits) for gauge in request.gauges.values()):
            return False  # the caller is slow
        return all(self._waits(task) for task in request.tasks.values())

    def _waits(self, task: Task) -> bool:
        """Whether a task can do nothing by itself."""
        if task.state is TaskState.RUNNING:
            limits = task.request.pipeline.spec.limits
            starves = any(not f.closed and not (f.gauge and f.gauge.behind(limits)) for f in task.feeds)
            return task in self._limited or starves
        if task.state is TaskState.QUEUED:
            return self._board.now - task.stage.progress > OTHERS_S
        return True
