"""What a user knows of one request, whichever client processes carry it; checks what comes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.protocol import Error
from tests.simulation.graphs import ATTEMPTS, content

if TYPE_CHECKING:
    from tests.simulation.clients import Stream
    from tests.simulation.world import World


class Call:
    """One request of a user."""

    def __init__(
        self, world: World, name: str, outputs: list[str], *, kind: str, stored: bool, deadline: bool
    ) -> None:
        self.world = world
        self.name = name
        self.kinds = {kind}  #: of the client processes that have carried it
        self.stored = stored
        self.deadline = deadline
        self.outputs: dict[str, list[int]] = {output: [] for output in outputs}
        self.number = 0
        self.sure = False  #: the broker has accepted it
        self.given_up = False  #: the user wants no more of it
        self.status: str | None = None
        self.left: float | None = None  #: when nobody was there for it any more
        self.forgotten = False  #: a client process has said that it has everything
        self.contested = False  #: several client processes want it
        self.stream: Stream | None = None  #: that carries it now

    @property
    def open(self) -> bool:
        """Whether the user waits for it."""
        return self.status is None and not self.given_up

    def accepted(self, number: int) -> None:
        """The broker says that it is its, and this client's."""
        if self.number not in (0, number):  # it was begun anew, by a submission that came again
            begun = any(self.outputs.values())
            assert not begun or self.contested, "a request has changed its number"
            assert self._may_be_forgotten(), "a request was begun anew, though nobody had ended it"
        self.number, self.sure, self.left = number, True, None

    def leave(self, when: float) -> None:
        """Its client goes. One that never heard that it is its changes nothing: it may have been too late."""
        if self.left is None:
            self.left = when

    def got(self, output: str, seq: int, value: int) -> None:
        """The user takes a chunk."""
        values = self.outputs[output]
        assert self.sure, "an output of a request that was not accepted"
        assert seq == len(values), "an output chunk is missing or doubled"
        values.append(value)
        expected = self._content(output)
        assert values == expected[: len(values)], "an output chunk says something else"

    def _content(self, output: str) -> list[int]:
        world = self.world
        return content(world.seeds[self.number], world.order.index(world.pipeline.outputs[output]))

    def finish(self, status: str, error: Error | None) -> None:
        """Everything has come, and this end."""
        assert self.status is None, "two ends"
        self.status = status
        if status == "done":
            for output, values in self.outputs.items():
                assert values == self._content(output), "an output is not whole"
        else:
            assert status == "failed", f"nobody had cancelled {self.name}"
            assert error is not None
            self._check_excuse(error)

    def cancelled(self) -> None:
        """The broker took its client for dead."""
        self.status = "cancelled"
        assert self._may_be_forgotten(), f"nobody had cancelled {self.name}"

    def _check_excuse(self, error: Error) -> None:
        world = self.world
        if error.type == "timeout" and error.stage is None:
            assert self.deadline, "there was no deadline"
        elif error.type == "lost_in_restart":
            keeps = any(edge.checkpoint != "none" for edge in world.pipeline.edges)
            assert world.memory.host_died or not keeps, "nothing can have been lost"
        else:
            assert error.stage is not None, f"{error.type}: {error.message}"
            stage = world.order.index(error.stage)
            forgets = any(
                edge.to == error.stage and edge.checkpoint == "none" for edge in world.pipeline.edges
            )
            blamed = world.blamed[self.number, stage]
            lost = blamed or world.broker.boot > 1  # a task may have been on its way to its worker
            assert blamed >= ATTEMPTS or (forgets and lost) or world.memory.host_died, (
                f"failed after {blamed} mishaps: {error.type}: {error.message}"
            )

    def refused(self, error: Error) -> None:
        """The broker does not have it, or does not want it."""
        self.status = "refused"
        if error.type == "overloaded":
            assert not self.sure, "an accepted request was refused"
            return
        assert error.status == 404, f"refused: {error.message}"
        assert self._may_be_forgotten(), f"{self.name} was lost: {error.message}"

    def _may_be_forgotten(self) -> bool:
        world = self.world
        if not self.sure or self.forgotten:
            return True
        checkpoints = {edge.checkpoint for edge in world.pipeline.edges}
        if world.memory.host_died and checkpoints != {"disk"}:
            return True
        if world.broker.boot > 1 and checkpoints == {"none"}:
            return True
        if self.left is None:
            return False
        keeps = self.stored or checkpoints != {"none"}
        if not keeps or ("api" in self.kinds and not self.stored):
            return True
        return world.now - self.left > (world.KEEP_S if self.stored else world.DETACHED_S)
