"""Whether a request may come in, and what it becomes. Decided at once, before anything is done for it."""

from __future__ import annotations

import re

from adapters.handle import Handle
from broker.core.blocks import Blocks
from broker.core.routes import BadRequest, Route
from broker.core.state import Feed, PipelineState, Request, Task
from broker.protocol import NAME, Submit

BAD_HANDLE = "it names memory outside the sender's own arena, or some twice"
SOONEST_S, LATEST_S = 1.0, 60.0  #: bounds of what Retry-After says

is_name = re.compile(NAME).fullmatch


class Overloaded(BadRequest):
    """There is no room now (429), or too little for this request (503); it may come again."""

    def __init__(self, message: str, retry_after_s: float, *, status: int = 429) -> None:
        super().__init__(message, "model", status=status)
        self.retry_after_s = min(max(retry_after_s, SOONEST_S), LATEST_S)


def route(m: Submit, pipelines: dict[str, PipelineState]) -> tuple[PipelineState, Route]:
    """The way of a request. Raises BadRequest (400, 404) for what the graph can't serve."""
    pipeline = pipelines.get(m.pipeline)
    if pipeline is None:
        offered = ", ".join(pipelines)
        raise BadRequest(f"no pipeline {m.pipeline!r}; this broker serves: {offered}", "model", status=404)
    if m.name and not is_name(m.name):
        raise BadRequest("a name has 8 to 64 letters, digits, - and _", "name")
    if unknown := set(m.params) - set(pipeline.router.order):
        raise BadRequest(f"{pipeline.name} has no stage {min(unknown)!r}", "params")
    return pipeline, pipeline.router.route(m.outputs, list(m.given), m.has)


def check_room(  # noqa: PLR0917 - one call, in requests
    m: Submit, pipeline: PipelineState, route: Route, blocks: Blocks, most_bytes: int, now: float
) -> None:
    """Raises Overloaded when the request would find no place, or could not end by its deadline."""
    given = sum(handle.nbytes for handle in given_handles(m))
    if given > most_bytes:  # what a handle claims is not looked at before somebody maps it
        raise BadRequest(f"{given >> 20} MiB of tensors; at most {most_bytes >> 20}", "given", status=413)
    if full(pipeline):
        message = f"{pipeline.name} has {pipeline.unfinished} unfinished requests"
        raise Overloaded(message, retry_after(pipeline))
    if blocks.nbytes > most_bytes:
        message = f"{blocks.nbytes >> 20} MiB of tensors are under way, the limit is {most_bytes >> 20}"
        raise Overloaded(message, retry_after(pipeline), status=503)
    if m.deadline_s is not None and (needs := _at_least(pipeline, route, now)) > m.deadline_s:
        message = f"it would take {needs:.1f} s at least, and its deadline is in {m.deadline_s:g} s"
        raise Overloaded(message, needs - m.deadline_s, status=503)


def full(pipeline: PipelineState) -> bool:
    """Whether the pipeline takes no more requests."""
    return pipeline.unfinished >= pipeline.spec.limits.max_requests


def retry_after(pipeline: PipelineState) -> float:
    """Seconds until half of what is unfinished now has ended, at the present pace."""
    return min(max(pipeline.pace * pipeline.unfinished / 2, SOONEST_S), LATEST_S)


def _at_least(pipeline: PipelineState, route: Route, now: float) -> float:
    """Seconds that the slowest stage on the way takes, with what waits there already.

    Stages overlap where they stream, so their sum would refuse what is possible.
    """
    stages = [pipeline.stages[number] for number in route.stages]
    return max(stage.scheduler.length * stage.stats.pace + stage.stats.expected(now) for stage in stages)


def build(number: int, m: Submit, pipeline: PipelineState, route: Route, now: float) -> Request:
    """The request with all its tasks; nothing runs yet."""
    request = Request(number, m, pipeline, route, now)
    for stage in route.stages:
        feeds = [Feed(inlet) for inlet in route.inlets[stage]]
        request.tasks[stage] = Task(request, pipeline.stages[stage], feeds)
    request.open = len(request.tasks)
    return request


def given_handles(m: Submit) -> list[Handle]:
    """All tensors that a submission brings along, but the small ones in its chunks' bodies."""
    return [handle for chunks in m.given.values() for chunk in chunks for handle in chunk.handles]


def owns(arena: str, name: str, handles: list[Handle]) -> bool:
    """Whether all these are the sender's: in the arena with this prefix, or files of the request ``name``."""
    return all(_prefixes(arena, name, handle) for handle in handles)


def _prefixes(arena: str, name: str, handle: Handle) -> bool:
    prefix = arena if handle.transport == "shm" else f"{name}/" if name else ""
    copied = not handle.copy or (bool(name) and handle.copy.startswith(f"{name}/"))
    return bool(prefix) and handle.block.place.startswith(prefix) and copied


def draw_seed(number: int) -> int:
    """SplitMix64's output function (Steele et al. 2014), cut to 63 bits: a seed that looks random."""
    z = (number * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1
