"""What the core says of itself when asked: `status`, `ready` and `metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from broker.core.lifecycle import TaskState
from broker.core.state import Request, StageState, Task, Worker
from broker.core.stats import BUCKETS, Histogram

if TYPE_CHECKING:
    from broker.core.machine import Core


def make(core: Core, what: str, now: float) -> dict[str, Any]:
    """The report named ``what``; an unknown name gives ``{"error": ...}``."""
    reports = {"status": _status, "ready": _ready, "metrics": _metrics, "placement": _placement}
    if what not in reports:
        return {"error": f"no report {what!r}; there are: {', '.join(reports)}"}
    return reports[what](core, now)


def of_request(core: Core, name: str) -> dict[str, Any]:
    """How a request stands."""
    request = core.board.names.get(name)
    return {"error_status": 404} if request is None else _request(core, request)


def of_stored(core: Core, tenant: str) -> dict[str, Any]:
    """How each of a tenant's stored requests stands."""
    requests = core.board.names.values()
    stored = [r for r in requests if r.submit.stored and r.submit.tenant == tenant]
    return {"requests": [_request(core, request) for request in stored]}


def _request(core: Core, request: Request) -> dict[str, Any]:
    error = request.ended.error if request.ended is not None else None
    running = any(task.state is TaskState.RUNNING for task in request.tasks.values())
    state = "running" if running or any(t.emitted for t in request.tasks.values()) else "queued"
    live = [task.timing for task in request.tasks.values()]
    timings = request.ended.timings if request.ended is not None else live  # tasks don't survive a restart
    counts: dict[str, int] = dict.fromkeys(request.submit.outputs, 0)
    for output, _ in request.outputs:
        counts[output] += 1
    return {
        "name": request.name,
        "state": request.ended.status if request.ended is not None else state,
        "pipeline": request.pipeline.name,
        "age_s": round(core.board.now - request.accepted, 3),
        "stages": [msgspec.to_builtins(timing) for timing in timings],
        "progress": {task.stage.name: _progress(task) for task in request.tasks.values()},
        "outputs": counts,
        "stored": request.submit.stored,
        "attached": request.client is not None,
        "error": msgspec.structs.asdict(error) if error is not None else None,
        "call": request.submit.call,
    }


class _Checkpoint(msgspec.Struct):
    """What there is to see of an engine's own state."""

    progress: float = 0.0


def _progress(task: Task) -> float:
    """How much of a task is done, 0 to 1: as its last checkpoint says, if its engine says so there."""
    if task.state is TaskState.DONE:
        return 1.0
    if task.checkpoint is None:
        return 0.0
    try:
        return min(max(msgspec.msgpack.decode(task.checkpoint.body, type=_Checkpoint).progress, 0.0), 1.0)
    except msgspec.DecodeError:
        return 0.0


def _ready(core: Core, now: float) -> dict[str, Any]:
    missing = [
        f"{pipeline.name}/{stage.name}"
        for pipeline in core.board.pipelines.values()
        for stage in pipeline.stages
        if not any(not worker.draining for worker in stage.workers.values())
    ]
    return {"ready": not missing, "missing": missing}


def _placement(core: Core, now: float) -> dict[str, Any]:
    """For those who start and end workers: how many are wanted, and what each guardian's have to do."""
    return {
        "stages": [
            {
                "stage": stage.label,
                "wanted": stage.scaler.wanted,
                "guardians": [
                    [g.host, g.pid, sum(len(worker.tasks) for worker in g.workers.values())]
                    for g in stage.guardians.values()
                ],
            }
            for pipeline in core.board.pipelines.values()
            for stage in pipeline.stages
        ]
    }


def _status(core: Core, now: float) -> dict[str, Any]:
    board = core.board
    return {
        "run": core.run,
        **_ready(core, now),
        "pipelines": {
            pipeline.name: {
                "unfinished": pipeline.unfinished,
                "stages": {stage.name: _stage(stage, core, now) for stage in pipeline.stages},
            }
            for pipeline in board.pipelines.values()
        },
        "tables": {
            "requests": sum(request.ended is None for request in board.requests.values()),
            "queued": sum(stage.scheduler.length for p in board.pipelines.values() for stage in p.stages),
            "running": sum(len(w.tasks) for w in core.workers.values()),
            "blocks": len(board.blocks),
            "block_bytes": board.blocks.nbytes,
            "holds": board.blocks.holds,
        },
        "kept": {
            "ended": sum(request.ended is not None for request in board.requests.values()),
            "letters": len(core.requests.letters),
        },
        "clients": [{"kind": c.kind, "requests": len(c.requests)} for c in core.clients.values()],
        "hosts": core.hosts.report(),
        "refused": dict(board.refused),
    }


def _stage(stage: StageState, core: Core, now: float) -> dict[str, Any]:
    stats = stage.stats
    return {
        "engine": stage.spec.engine,
        "queued": stage.scheduler.length,
        "running": stage.running,
        "workers": [_worker(worker, now) for worker in stage.workers.values()],
        "starting": sum(not guardian.workers for guardian in stage.guardians.values()),
        "replicas": _replicas(stage, core, now),
        "tasks": stats.counts(),
        "chunks": stats.chunks,
        "work": {
            "busy_s": round(stats.busy_s, 6),
            "lost_s": round(stats.lost_s, 6),
            "chunks": stats.chunks,
            "lost_chunks": stats.lost_chunks,
        },
    }


def _replicas(stage: StageState, core: Core, now: float) -> dict[str, Any]:
    scaler = stage.scaler
    return {
        "min": scaler.least,
        "max": scaler.most,
        "wanted": scaler.wanted,
        "present": sum(not worker.draining for worker in stage.workers.values()),
        "why": scaler.why,
        "since_s": round(now - scaler.since, 3) if scaler.since is not None else 0.0,
        "trouble": next(filter(None, (c.unplaced.get(stage.label) for c in core.clients.values())), ""),
    }


def _worker(worker: Worker, now: float) -> dict[str, Any]:
    states = [task.state for task in worker.tasks.values()]
    return {
        "pid": worker.pid,
        "guardian": worker.guardian.pid,
        "host": worker.guardian.host,
        "device": worker.guardian.device,
        "running": states.count(TaskState.RUNNING),
        "cancelling": states.count(TaskState.CANCELLING),
        "credit": worker.credit,
        "draining": worker.draining,
        "up_s": round(now - worker.since, 3),
    }


def _metrics(core: Core, now: float) -> dict[str, Any]:
    board = core.board
    return {
        "requests": [[name, status, n] for (name, status), n in board.ended.items()],
        "unfinished": [[p.name, p.unfinished] for p in board.pipelines.values()],
        "stages": [_stage_metrics(stage) for p in board.pipelines.values() for stage in p.stages],
        "block_bytes": board.blocks.nbytes,
        "refused": dict(board.refused),
        "buckets_s": BUCKETS,
    }


def _stage_metrics(stage: StageState) -> dict[str, Any]:
    stats = stage.stats
    return {
        "pipeline": stage.pipeline.name,
        "stage": stage.name,
        "queued": stage.scheduler.length,
        "running": stage.running,
        "workers": len(stage.workers),
        "replicas_wanted": stage.scaler.wanted,
        "replicas_min": stage.scaler.least,
        "replicas_max": stage.scaler.most,
        "tasks": stats.counts(),
        "chunks": stats.chunks,
        "busy_s": stats.busy_s,
        "lost_s": stats.lost_s,
        "lost_chunks": stats.lost_chunks,
        "wait": _histogram(stats.wait),
        "service": _histogram(stats.service),
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    return {"counts": histogram.counts, "sum": histogram.total}
