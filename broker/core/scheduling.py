"""Which waiting task runs next, and on which worker.

Order within a stage: priority, then earliest deadline, then fair share between tenants, then arrival. Fair
share is start-time fair queuing: each tenant's n-th task gets a virtual start time after its own n-1-th, and
never before the stage's present one, so a tenant that floods the stage waits behind its own flood only.

A task whose worker died together with others is tried alone: one worker takes nothing new until all that it
holds has proved harmless, by giving something, then gets such tasks one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from broker.core.lifecycle import TaskState

if TYPE_CHECKING:
    from broker.core.state import Task, Worker

    Assign = Callable[[Task, Worker], None]


class Scheduler:
    """The queue of one stage and the workers that ask for its tasks."""

    __slots__ = ("_arrivals", "_heap", "_idle", "_reserved", "_shares", "_solo", "_virtual", "length")

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, float, int, Task]] = []
        self._solo: deque[Task] = deque()
        self._idle: deque[Worker] = deque()  #: workers with credit, each once, in turn
        self._reserved: Worker | None = None  #: runs solo tasks and nothing else meanwhile
        self._shares: dict[str, float] = {}
        self._virtual = 0.0
        self._arrivals = 0
        self.length = 0  #: queued tasks; entries of tasks that left meanwhile are skipped when met

    def place(self, task: Task, assign: Assign) -> None:
        """Hands a task to a worker at once if one waits and nobody else does; else queues it."""
        if self._idle and not self.length and not task.solo:
            worker = self._idle.popleft()
            worker.credit -= 1
            assign(task, worker)
            if worker.credit > 0:
                self._idle.append(worker)
        else:
            self.push(task)
            self.dispatch(assign)

    def push(self, task: Task) -> None:
        """Queues a task. A task that is tried again keeps its request's deadline and priority."""
        task.state = TaskState.QUEUED
        self.length += 1
        if task.solo:
            self._solo.append(task)
            return
        request = task.request
        tenant = request.submit.tenant
        if not self._heap:
            self._shares.clear()
        share = max(self._virtual, self._shares.get(tenant, 0.0))
        self._shares[tenant] = share + 1.0
        self._arrivals += 1
        deadline = inf if request.deadline is None else request.deadline
        heappush(self._heap, (request.submit.priority, deadline, share, self._arrivals, task))

    def forget(self, task: Task) -> None:
        """The task has left the queue by another way (cancelled); its state says so already."""
        self.length -= 1
        if len(self._heap) > 64 and len(self._heap) > 2 * self.length:
            self._heap = [entry for entry in self._heap if entry[-1].state is TaskState.QUEUED]
            self._heap.sort()

    def add_credit(self, worker: Worker, credit: int) -> None:
        """The worker asks for so many more."""
        if worker.credit <= 0 < worker.credit + credit and worker is not self._reserved:
            self._idle.append(worker)
        worker.credit += credit

    def remove(self, worker: Worker) -> None:
        """The worker is gone, or takes nothing new."""
        worker.credit = 0
        if worker in self._idle:
            self._idle.remove(worker)
        if self._reserved is worker:
            self._reserved = None

    def dispatch(self, assign: Assign) -> None:
        """Hands tasks to workers until one of the two runs out."""
        if self._solo or self._reserved is not None:
            self._dispatch_solo(assign)
        while self._heap and self._idle and (task := self._pop()) is not None:
            worker = self._idle.popleft()
            self._give(task, worker, assign)
            if worker.credit > 0:
                self._idle.append(worker)

    @property
    def testing(self) -> bool:
        """Whether tasks are tried alone."""
        return self._reserved is not None

    def _dispatch_solo(self, assign: Assign) -> None:
        while self._solo and self._solo[0].state is not TaskState.QUEUED:
            self._solo.popleft()
        if self._solo and self._reserved is None and self._idle:
            self._reserved = min(self._idle, key=_suspects)
            self._idle.remove(self._reserved)
        worker = self._reserved
        if worker is None or _suspects(worker) or worker.credit <= 0:
            return
        if self._solo:
            self._give(self._solo.popleft(), worker, assign)
        else:
            self._reserved = None
            self._idle.append(worker)

    def _pop(self) -> Task | None:
        while self._heap:
            _, _, share, _, task = heappop(self._heap)
            if task.state is TaskState.QUEUED:
                self._virtual = max(self._virtual, share)
                return task
        return None

    def _give(self, task: Task, worker: Worker, assign: Assign) -> None:
        self.length -= 1
        worker.credit -= 1
        assign(task, worker)


def _suspects(worker: Worker) -> int:
    """How many of a worker's tasks have given nothing yet."""
    return sum(not task.proved for task in worker.tasks.values())
