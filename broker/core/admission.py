"""Whether a request may come in, and what it becomes. Decided at once, before anything is done for it."""

from __future__ import annotations

from adapters.handle import Handle
from broker.core.blocks import Blocks
from broker.core.routes import BadRequest
from broker.core.state import Client, Feed, PipelineState, Request, Task
from broker.protocol import Submit

BAD_HANDLE = "it names memory outside the sender's own arena, or some twice"


def admit(
    m: Submit,
    client: Client,
    pipelines: dict[str, PipelineState],
    blocks: Blocks,
    *,
    number: int,
    entropy: int,
    now: float,
) -> Request:
    """Makes the request and its tasks, and takes note of the blocks it brings.

    Raises BadRequest, with nothing changed, for what the graph can't serve (400, 404) and for a full pipeline
    (429).
    """
    pipeline = pipelines.get(m.pipeline)
    if pipeline is None:
        offered = ", ".join(pipelines)
        raise BadRequest(f"no pipeline {m.pipeline!r}; this broker serves: {offered}", "model", status=404)
    if m.tag in client.requests:
        raise BadRequest("the tag is in use", "tag")
    if unknown := set(m.params) - set(pipeline.router.order):
        raise BadRequest(f"{pipeline.name} has no stage {min(unknown)!r}", "params")
    route = pipeline.router.route(m.outputs, list(m.given), m.has)
    if pipeline.unfinished >= pipeline.spec.limits.max_requests:
        raise BadRequest(
            f"{pipeline.name} has {pipeline.unfinished} unfinished requests", "model", status=429
        )
    handles = [h for chunks in m.given.values() for chunk in chunks for h in chunk.handles]
    if not owns(client.arena, handles) or not blocks.add(client.peer, handles):
        raise BadRequest(BAD_HANDLE, "given")
    request = Request(number, client, m.tag, pipeline, now=now)
    request.route = route
    request.params = m.params
    request.seed = _mix(entropy + number) if m.seed is None else m.seed & 0x7FFFFFFFFFFFFFFF
    request.priority, request.tenant = m.priority, m.tenant
    request.deadline = None if m.deadline_s is None else now + m.deadline_s
    for stage in route.stages:
        feeds = [Feed(inlet.edge, inlet.stream) for inlet in route.inlets[stage]]
        request.tasks[stage] = Task(request, pipeline.stages[stage], feeds)
    request.open = len(request.tasks)
    pipeline.unfinished += 1
    return request


def owns(arena: str, handles: list[Handle]) -> bool:
    """Whether all these lie in the arena with this prefix; "" stands for no arena."""
    return all(arena and h.block.place.startswith(arena) for h in handles)


def _mix(number: int) -> int:
    """SplitMix64's output function (Steele et al. 2014), cut to 63 bits: a seed that looks random."""
    z = (number * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1
