"""The way of one edge's chunks from other hosts: pulled ahead of the job that will read them, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from adapters.handle import AdapterError, BlockId, Chunk, Unreachable, blocks_of
from adapters.let_go import let_go
from broker.abroad import Abroad
from pipelines.graph import Edge


class Arrivals:
    """Chunks of one edge from the first on that lies elsewhere; those after it keep their place.

    At most ``edge.prefetch.window`` are here, or on their way, before the job has read them. So a job that
    waits for its turn finds its inputs here, and a job that is slow takes no memory for all of them.

    Args:
        edge: Whose they are.
        abroad: Brings them here.
        unread: How many chunks wait for the job already.
        deliver: Gets each chunk as its turn comes, and whether it was the last. False: it can't be read, and
            nothing more is wanted.
        fail: Gets the error that ends the edge.
        released: Called for each block that nobody looks at any longer.
    """

    def __init__(
        self,
        edge: Edge,
        abroad: Abroad,
        *,
        unread: int,
        deliver: Callable[[list[Chunk], bool], bool],
        fail: Callable[[AdapterError], None],
        released: Callable[[BlockId], None],
    ) -> None:
        self._edge = edge
        self._abroad = abroad
        self._unread = unread
        self._deliver = deliver
        self._fail = fail
        self._released = released
        self._waiting: deque[Chunk] = deque()
        self._coming: deque[_Coming] = deque()
        self._ended = False  #: nothing comes after those that are known
        self._closed = False

    def add(self, chunks: list[Chunk], *, ended: bool) -> None:
        """More has come from the broker."""
        if self._closed:
            self._drop(chunks)
            return
        self._waiting += chunks
        self._ended = self._ended or ended
        if not (self._waiting or self._coming):
            self._deliver([], self._ended)
        self._go_on()

    def took(self, chunks: int) -> None:
        """The job has read so many."""
        self._unread -= chunks
        self._go_on()

    def close(self) -> None:
        """The job has ended. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for coming in self._coming:
            coming.task.remove_done_callback(self._arrived)
            coming.task.cancel()
            if not coming.begun:
                self._drop([coming.chunk])
            coming.task.add_done_callback(self._discard)
        self._coming.clear()
        self._drop(self._waiting)
        self._waiting.clear()

    def _go_on(self) -> None:
        while self._waiting and self._unread + len(self._coming) < self._edge.prefetch.window:
            coming = _Coming(self._waiting.popleft())
            coming.task = asyncio.ensure_future(self._bring(coming))
            coming.task.add_done_callback(self._arrived)
            self._coming.append(coming)

    async def _bring(self, coming: _Coming) -> Chunk:
        coming.begun, chunk = True, coming.chunk
        if not self._abroad.foreign(chunk):
            return chunk
        transport = self._edge.transport
        if transport == "shm":
            self._drop([chunk])
            raise Unreachable("its transport is shm, and the tensors lie on another host")
        return await self._abroad.land(chunk, self._released, transport)

    def _arrived(self, task: asyncio.Task[Chunk]) -> None:
        """One is here; those that are next in turn are handed on."""
        while self._coming and self._coming[0].task.done():
            first = self._coming.popleft().task
            try:
                chunk = first.result()
            except Exception as error:  # keys that can't be used, or no memory or descriptor left: whatever
                self.close()  # else it is, a job that isn't told waits for ever
                edge = f"{self._edge.from_} -> {self._edge.to}"
                if isinstance(error, AdapterError):
                    self._fail(type(error)(f"{edge}: {error}"))
                else:
                    self._fail(AdapterError(f"{edge}: {type(error).__name__}: {error}"))
                let_go(error)  # it holds our frame, that the task, and that the error, and what came with it
                return
            except asyncio.CancelledError:  # the loop ends
                self.close()
                return
            self._unread += 1
            if not self._deliver([chunk], self._ended and not (self._coming or self._waiting)):
                self.close()
                return
        self._go_on()

    def _discard(self, task: asyncio.Task[Chunk]) -> None:
        """It came in the moment of the end."""
        if not task.cancelled() and task.exception() is None:
            self._drop([task.result()])

    def _drop(self, chunks: list[Chunk] | deque[Chunk]) -> None:
        for chunk in chunks:
            for block in blocks_of(chunk):
                self._released(block)


class _Coming:
    """A chunk on its way."""

    __slots__ = ("begun", "chunk", "task")

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.begun = False  #: before its first step a cancelled task would run none of its clean-up
        self.task: asyncio.Task[Chunk]
