"""A pipeline compiled for the core: which tasks a request needs and how their chunks flow."""

from __future__ import annotations

from typing import NamedTuple

from pipelines.graph import REQUEST, Edge, Pipeline


class Slot(NamedTuple):
    """One input of one task: the consuming stage, and the position among the task's inputs."""

    stage: int
    position: int


class Inlet(NamedTuple):
    """One edge into a task."""

    edge: int  #: its number on the wire
    stream: bool  #: whether its first chunk is enough to start
    producer: int | None  #: the stage it comes from; None: from the caller
    forgets: bool  #: keeps nothing that was delivered


class Route:
    """What one kind of request (same outputs, same given producers, same modalities) needs.

    Attributes:
        stages: Stage numbers to run, producers first.
        inlets: Stage number -> its inlets.
        consumers: Producing stage number -> the slots that get its chunks.
        given: Name of a producer the caller stands in for -> the slots that get its chunks.
        outputs: Stage number -> the names of the outputs it gives to the caller.
        paced: Stages that somebody's reading may slow: a streaming consumer's, or the caller's.
    """

    __slots__ = ("consumers", "given", "inlets", "outputs", "paced", "stages")

    def __init__(self, pipeline: Pipeline, names: list[str], outputs: list[str], given: set[str]) -> None:
        order = {name: number for number, name in enumerate(pipeline.order())}
        needed = pipeline.needed(outputs, given, set(names))
        self.stages = [order[name] for name in needed]
        self.inlets: dict[int, list[Inlet]] = {}
        self.consumers: dict[int, list[Slot]] = {number: [] for number in self.stages}
        self.given: dict[str, list[Slot]] = {name: [] for name in given}
        self.outputs: dict[int, list[str]] = {}
        self.paced: set[int] = set()
        for name in needed:
            inlets = self.inlets[order[name]] = []
            for number, edge in pipeline.into(name):
                if edge.from_ in given or edge.from_ in needed:
                    self._producers(edge, order, given).append(Slot(order[name], len(inlets)))
                    producer = None if edge.from_ in given else order[edge.from_]
                    if edge.stream and producer is not None:
                        self.paced.add(producer)
                    inlets.append(Inlet(number, edge.stream, producer, edge.checkpoint == "none"))
        for output in outputs:
            self.outputs.setdefault(order[pipeline.outputs[output]], []).append(output)
        self.paced |= self.outputs.keys()

    def _producers(self, edge: Edge, order: dict[str, int], given: set[str]) -> list[Slot]:
        return self.given[edge.from_] if edge.from_ in given else self.consumers[order[edge.from_]]


class BadRequest(ValueError):
    """A request the graph can't serve. ``param`` names the field."""

    def __init__(self, message: str, param: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class Router:
    """Finds, checks and remembers the routes of one pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.order = pipeline.order()
        self._modalities = {name for stage in pipeline.stages.values() for name in stage.waits_for}
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], Route] = {}

    def route(self, outputs: list[str], given: list[str], has: list[str]) -> Route:
        """The route for a request. Raises BadRequest for outputs or producers that the graph lacks."""
        key = (tuple(outputs), tuple(given), tuple(has))
        route = self._known.get(key)
        if route is None:
            self._check(outputs, given)
            route = Route(self.pipeline, [m for m in has if m in self._modalities], outputs, set(given))
            if not route.stages:
                raise BadRequest("nothing to do: no stage is needed for these outputs", "outputs")
            if len(self._known) < 256:  # a caller that varies the order of its lists must not fill memory
                self._known[key] = route
        return route

    def _check(self, outputs: list[str], given: list[str]) -> None:
        offered = ", ".join(sorted(self.pipeline.outputs))
        if not outputs or len(set(outputs)) != len(outputs):
            raise BadRequest(f"outputs must be distinct and at least one of: {offered}", "outputs")
        for output in outputs:
            if output not in self.pipeline.outputs:
                message = f"{self.pipeline.name} gives no output {output!r}; it gives: {offered}"
                raise BadRequest(message, "outputs")
            if self.pipeline.outputs[output] in given:
                raise BadRequest(f"the caller supplies what output {output!r} is made of", "outputs")
        for name in given:
            if name != REQUEST and name not in self.pipeline.stages:
                raise BadRequest(f"{self.pipeline.name} has no stage {name!r}", "given")
