"""Which workers a placer keeps for each stage: the difference between those and what the broker wants."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pipelines.graph import Pipeline, Stage

if TYPE_CHECKING:
    from broker.asking import Asker

ASK_EVERY_S = 1.0

Guardian = tuple[str, int]  #: a guardian as the broker knows it: its machine's name and its process


class Kept(Protocol):
    """One worker that is kept alive until it is told to leave."""

    @property
    def guardian(self) -> Guardian | None:
        """Who keeps it, once that is known."""
        ...

    @property
    def gone(self) -> bool:
        """It was told to leave, and has left."""
        ...

    def drain(self) -> None:
        """Tells it to finish what it holds and to leave."""
        ...


K = TypeVar("K", bound=Kept)


class Post:
    """A stage that workers are kept for."""

    __slots__ = ("label", "name", "pipeline", "stage")

    def __init__(self, pipeline: Pipeline, name: str, stage: Stage) -> None:
        self.pipeline = pipeline.name
        self.name = name
        self.stage = stage
        self.label = f"{pipeline.name}/{name}"


def posts(pipelines: list[Pipeline]) -> list[Post]:
    """All stages of all pipelines."""
    return [Post(pipeline, name, stage) for pipeline in pipelines for name, stage in pipeline.stages.items()]


class Roster(Generic[K]):
    """The workers of one placer. Each has a place in its stage, from 0 on, that nobody else has.

    Args:
        stages: All that workers are kept for.
        hire: Starts a worker of a stage in a place.
    """

    def __init__(self, stages: list[Post], hire: Callable[[Post, int], K]) -> None:
        self._posts = {post.label: post for post in stages}
        self._hire = hire
        self._kept: dict[str, dict[int, K]] = {post.label: {} for post in stages}
        self._leaving: dict[str, dict[int, K]] = {post.label: {} for post in stages}

    def begin(self) -> None:
        """Starts as many of each stage as there are at least."""
        for label, post in self._posts.items():
            self.keep(label, post.stage.resources.least, {})

    async def following(self, address: str) -> AsyncGenerator[Asker, None]:
        """Carries out the broker's reports, one a second, until it is closed or cancelled.

        After each it gives the one who asks for them, who can tell the broker something.
        """
        from broker.asking import Asker  # not at the head: the front starts before all else

        asker = Asker(address, "placer", "placement")
        try:
            while True:
                report = await asker.ask(ASK_EVERY_S)
                if report is not None:
                    self.follow(report)
                    yield asker
        finally:
            asker.close()

    def follow(self, report: dict[str, Any]) -> None:
        """Carries out the broker's report "placement"."""
        for told in report["stages"]:
            tasks = {(host, pid): number for host, pid, number in told["guardians"]}
            self.keep(told["stage"], told["wanted"], tasks)

    def keep(self, label: str, wanted: int, tasks: Mapping[Guardian, int]) -> None:
        """Starts workers of a stage, or tells some to leave: those with the least to do, of these the latest.

        The place of one that leaves is taken again only when it has left: its device is in use until then.
        """
        kept, leaving = self._kept[label], self._leaving[label]
        for place in [place for place, worker in leaving.items() if worker.gone]:
            del leaving[place]
        while len(kept) > wanted:
            place = min(kept, key=lambda place: (_tasks(kept[place], tasks), -place))
            worker = leaving[place] = kept.pop(place)
            worker.drain()
        post = self._posts[label]
        for place in range(post.stage.resources.most):
            if len(kept) < wanted and place not in kept and place not in leaving:
                kept[place] = self._hire(post, place)

    def workers(self) -> list[K]:
        """All that have not left."""
        of_stages = (*self._kept.values(), *self._leaving.values())
        return [worker for of_stage in of_stages for worker in of_stage.values()]

    def kept(self, label: str) -> dict[int, K]:
        """Those of a stage that are to stay, by place."""
        return self._kept[label]


def _tasks(worker: Kept, tasks: Mapping[Guardian, int]) -> int:
    guardian = worker.guardian
    return tasks.get(guardian, 0) if guardian is not None else 0
