"""A pipeline's stages in one process, without a broker: for scripts that look into an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from adapters.chunk import Payload
from pipelines.graph import REQUEST, Pipeline
from pipelines.options import ENGINES
from workers.engine import Job, Stream
from workers.families.find import find_class
from workers.inputs import find_transfer

#: Stage's name -> all its payloads; and the request's own.
Made = dict[str, list[Payload]]


class Inside:
    """Started engines by their stages' names, in the order in which they work."""

    def __init__(self, graph: Pipeline, engines: Mapping[str, Any]) -> None:
        self.graph = graph
        self.engines = engines

    def job(self, name: str, made: Made, params: dict[str, Any], seed: int) -> Job:
        """A stage's job, with what its producers have made."""
        inputs: dict[str, Any] = {}
        for _, edge in self.graph.into(name):
            if edge.from_ in made:
                payloads = Stream(list(made[edge.from_]), closed=True)
                inputs[edge.from_] = find_transfer(edge.transfer)(payloads) if edge.transfer else payloads
        return Job(f"inside/{name}/1", inputs, params, seed)

    async def stage(self, name: str, made: Made, params: dict[str, Any], seed: int) -> list[Payload]:
        """All that one stage gives."""
        return [p async for p in self.engines[name].run(self.job(name, made, params, seed))]

    async def before(self, last: str, request: Payload, params: dict[str, Any], seed: int) -> Made:
        """What there is when a stage's turn comes."""
        made: Made = {REQUEST: [request]}
        for name in self.engines:
            if name == last:
                break
            made[name] = await self.stage(name, made, params, seed)
        return made


@asynccontextmanager
async def inside(graph: Pipeline, last: str, *, device: str = "cpu") -> AsyncIterator[Inside]:
    """The stages up to ``last``, those that a request without pictures needs. Raises what engines raise."""
    async with AsyncExitStack() as stack:
        engines: dict[str, Any] = {}
        for name in graph.needed(list(graph.outputs)[:1], {REQUEST}, set()):
            if name == last or _leads(graph, name, last):
                stage = graph.stages[name]
                engine = find_class(ENGINES[stage.engine].implementation)(stage, device=device)
                await engine.start()
                stack.push_async_callback(engine.stop)
                engines[name] = engine
        yield Inside(graph, engines)


def _leads(graph: Pipeline, name: str, later: str) -> bool:
    """Whether one stage's payloads go into the other, perhaps by way of more."""
    sources = [edge.from_ for _, edge in graph.into(later) if edge.from_ != REQUEST]
    return name in sources or any(_leads(graph, name, each) for each in sources)
