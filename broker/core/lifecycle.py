"""Where a task can stand."""

from __future__ import annotations

from enum import Enum


class TaskState(Enum):
    """Where a task stands. ``CANCELLING``: its request is over, but a worker still has it."""

    WAITING = "waiting"
    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    DONE = "done"
