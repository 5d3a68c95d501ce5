"""The one interface of all stage engines.

An engine runs jobs concurrently; how it batches them is its own affair. A job has its inputs, its
parameters, a seed, perhaps something to resume from, and it may be cancelled at any await.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from adapters.chunk import Payload
from pipelines.graph import Stage

#: What an engine may yield in the place of a payload that is out already: see :attr:`Job.emitted`.
OUT: Payload = {}


class ItemError(Exception):
    """The job's own fault (bad input, model refuses it): fail this job, keep its mates.

    ``status`` 4xx means that another try can't help, so the broker makes none.
    """

    def __init__(self, message: str, *, status: int = 500, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class Stream:
    """What comes over one edge: an async iterator of payloads that may still be growing. One reader.

    Args:
        items: What is there already.
        closed: They are all.
        taken: Told how many payloads the reader takes, each time; whoever sends them may wait for that.
    """

    __slots__ = ("_closed", "_error", "_items", "_taken", "_waiter")

    def __init__(
        self,
        items: list[Payload] | None = None,
        *,
        closed: bool = False,
        taken: Callable[[int], None] = lambda payloads: None,
    ) -> None:
        self._items: list[Payload] = items or []
        self._closed = closed
        self._taken = taken
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def unread(self) -> int:
        """How many payloads wait for the reader."""
        return len(self._items)

    def feed(self, items: list[Payload], *, closed: bool) -> None:
        """Adds payloads; ``closed``: they are the last."""
        self._items += items
        self._closed = self._closed or closed
        self._wake()

    def fail(self, error: BaseException) -> None:
        """The reader gets this error after what it already has."""
        self._error = error
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[Payload]:
        return self

    async def __anext__(self) -> Payload:
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            await self._wait()
        self._taken(1)
        return self._items.pop(0)

    async def all(self) -> list[Payload]:
        """Waits for the end of the stream and returns everything. Takes it as it comes, not at the end."""
        everything: list[Payload] = []
        while True:
            items, self._items = self._items, []
            everything += items
            self._taken(len(items))
            if self._closed:
                break
            await self._wait()
        if self._error is not None:
            raise self._error
        return everything

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


async def _no_checkpoint(state: Payload) -> None:
    """Nobody keeps it."""


class Job:
    """One attempt of one task, as an engine sees it.

    **Checkpoints.** ``await job.checkpoint(state)`` keeps the engine's own state, so that the next attempt
    need not begin at the beginning: token lists, a diffusion's latents and the step they are of, a place in a
    clip.

    * The state is a payload: scalars, strings, bytes, lists and tensors of any size. It is copied before the
      call returns; large tensors go through shared memory, and to disk too where the chunks of the stage do.
      So take one as often as the work between two is worth the copy.
    * Called by the generator itself, between two yields, it stands for the moment after all payloads yielded
      so far. It replaces the one before.
    * The next attempt finds the last one that arrived in ``resume_state``; its tensors are read-only views.
      It may be older than ``emitted`` says, or None: payloads may have gone out since, and a state may be
      lost with the machine it lay on. So a state should hold the number of payloads that it covers, and the
      engine must be able to compute those between again, without yielding them twice.
    """

    __slots__ = (
        "attempt",
        "cancelled",
        "checkpoint",
        "consumers",
        "emitted",
        "inputs",
        "name",
        "params",
        "resume_state",
        "resumed",
        "seed",
    )

    def __init__(
        self,
        name: str,
        inputs: dict[str, AsyncIterator[Payload]],
        params: dict[str, Any],
        seed: int,
        *,
        attempt: int = 1,
        emitted: int = 0,
        resumed: list[Payload] | None = None,
        resume_state: Payload | None = None,
        checkpoint: Callable[[Payload], Awaitable[None]] = _no_checkpoint,
        consumers: frozenset[str] = frozenset(),
    ) -> None:
        self.name = name  #: "request/stage/attempt", for logs and for engines that want ids
        self.inputs = inputs  #: producer's name -> its payloads, transfer adapter and window applied
        self.params = params  #: the request's parameters for this stage, already decoded
        self.seed = seed  #: the same in every attempt
        self.attempt = attempt
        self.emitted = emitted  #: payloads that earlier attempts got out
        self.resumed = resumed or []  #: small fields of the chunks that earlier attempts got out (no tensors)
        self.resume_state = resume_state  #: the last checkpoint an earlier attempt made, or None
        self.checkpoint = checkpoint  #: keeps a state for the next attempt, see above
        self.consumers = consumers  #: the stages that get its payloads in this request
        self.cancelled = False  #: set before the task is cancelled; for code on threads

    async def gather(self, producer: str) -> list[Payload]:
        """All payloads of one input, waiting for its end. An absent input is empty."""
        stream = self.inputs.get(producer)
        if stream is None:
            return []
        if isinstance(stream, Stream):
            return await stream.all()
        return [payload async for payload in stream]


class Engine(Protocol):
    """What a worker process runs. Built with ``Engine(stage, device=...)``; loads its libraries in ``start``.

    ``resumes`` says what the engine does with what earlier attempts got out. False: its payloads are counted
    from the first one again; it must repeat itself exactly (same inputs, same seed, same payloads), and the
    worker drops the first ``job.emitted``. So it need not compute those: :data:`OUT` may stand in their
    places. True: it gets ``job.resumed`` and yields only what comes after.
    """

    resumes: bool

    def __init__(self, stage: Stage, *, device: str) -> None: ...

    async def start(self) -> None:
        """Loads the model. Progress goes to the log; an error here is fatal for the process."""
        ...

    def run(self, job: Job) -> AsyncIterator[Payload]:
        """Computes one job. Raises :class:`ItemError` for the job's own faults; CancelledError stops it."""
        ...

    async def stop(self) -> None:
        """Lets everything go."""
        ...
