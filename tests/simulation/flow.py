"""Checks that no task is let further ahead of its consumers than the limits say."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from broker.core.lifecycle import TaskState

if TYPE_CHECKING:
    from broker.core.machine import Core

UNLIMITED = 1 << 60


class FlowCheck:
    """What consumers have really taken, whatever they have told the broker."""

    def __init__(self) -> None:
        self._edges: defaultdict[tuple[int, int], int] = defaultdict(int)  #: (request, edge) -> chunks
        self._outputs: defaultdict[tuple[int, str], int] = defaultdict(int)

    def edge(self, request: int, edge: int, chunks: int) -> None:
        """The most advanced attempt of a consumer has got so far."""
        key = (request, edge)
        self._edges[key] = max(self._edges[key], chunks)

    def output(self, request: int, output: str, chunks: int) -> None:
        """A caller has got so far."""
        key = (request, output)
        self._outputs[key] = max(self._outputs[key], chunks)

    def check(self, core: Core, number: int, stage: int, chunks: int) -> None:
        """A task has been granted so many chunks."""
        request = core.board.requests.get(number)
        if request is None:
            return
        task = request.tasks[stage]
        taken = []
        for slot in request.route.consumers[stage]:
            consumer = request.tasks[slot.stage]
            feed = consumer.feeds[slot.position]
            if feed.stream and consumer.state not in (TaskState.DONE, TaskState.CANCELLING):
                taken.append(self._edges[number, feed.edge])
        if request.listener is not None:
            taken += [self._outputs[number, name] for name in request.route.outputs.get(stage, ())]
        if taken:
            most = min(taken) + request.pipeline.spec.limits.ahead_chunks * task.boost
            assert chunks <= most, f"a task may give {chunks} chunks, {most} would be within the limits"
