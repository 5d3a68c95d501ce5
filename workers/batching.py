"""Grouping the work of concurrent jobs, for models that only know ``forward(batch)``.

A job submits one item at a time and waits for its result, so jobs take turns whatever their number of items.
The oldest item chooses the batch: the items that agree with it in :meth:`BatchingEngine.key` go along, in
order of arrival. ``forward`` runs in a thread of its own, so the event loop stays free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

from adapters.chunk import Payload
from pipelines.graph import Stage
from workers.engine import Job
from workers.engines.engine_thread import die, is_fatal

Item = TypeVar("Item")
Result = TypeVar("Result")
T = TypeVar("T")


class BatchingEngine(Generic[Item, Result]):
    """Base of engines whose model computes several items in one pass.

    A subclass has :meth:`forward`, perhaps :meth:`key`, and a ``run`` that awaits :meth:`submit`. The stage's
    ``batch.max_batch_size`` bounds a batch, ``batch.wait_ms`` says how long the oldest item waits for
    company.
    """

    resumes = False
    #: Batches that are computed side by side, each in a thread of its own; those that are free share what
    #: waits. Set before ``start``.
    lanes = 1

    def __init__(self, stage: Stage, *, device: str) -> None:
        self.stage = stage
        self.device = device
        self.max_batch_size = stage.batch.max_batch_size
        self._waiting: list[_Entry[Item, Result]] = []
        self._arrival = asyncio.Event()
        self._computing = 0  # lanes that do
        self._threads: ThreadPoolExecutor | None = None
        self._loops: list[asyncio.Task[None]] = []

    def key(self, item: Item) -> Hashable:
        """What must agree among the items of one batch: shapes, say."""
        return None

    def forward(self, items: Sequence[Item]) -> Sequence[Result | Exception]:
        """Computes a batch, on a thread of the engine's: one result an item, in order.

        An exception in a result's place fails that item. One that is raised fails nobody yet: the items are
        computed again one by one, and those fail that raise alone.
        """
        raise NotImplementedError

    def load(self) -> None:
        """Loads the model, on a thread of the engine's, before all else."""

    async def start(self) -> None:
        """Loads the model and begins to serve."""
        self._threads = ThreadPoolExecutor(self.lanes, thread_name_prefix="forward")
        await self._in_thread(self.load)
        self._loops = [asyncio.create_task(self._serve()) for _ in range(self.lanes)]

    async def stop(self) -> None:
        """Stops serving; items that are not finished are cancelled."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        for entry in self._waiting:
            entry.future.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def run(self, job: Job) -> AsyncIterator[Payload]:
        """Computes one job."""
        raise NotImplementedError

    async def submit(self, item: Item) -> Result:
        """Computes an item, in whatever company. Cancelled, it leaves the queue; its batch mates go on."""
        entry = _Entry[Item, Result](item, self.key(item))
        self._waiting.append(entry)
        self._arrival.set()
        return await entry.future

    async def _serve(self) -> None:
        while True:
            await self._next_arrival(None)
            while batch := await self._collect():
                self._computing += 1
                try:
                    await self._compute(batch)
                finally:
                    self._computing -= 1
                    _give_up(batch)

    async def _collect(self) -> list[_Entry[Item, Result]]:
        """Takes the oldest item and its company from the queue; [] when nobody waits any more."""
        loop, wait_s = asyncio.get_running_loop(), self.stage.batch.wait_ms / 1e3
        while True:
            self._waiting = [entry for entry in self._waiting if not entry.future.done()]
            if not self._waiting:
                return []
            oldest = self._waiting[0]
            company = [entry for entry in self._waiting if entry.key == oldest.key]
            left = oldest.arrived + wait_s - loop.time()
            if len(company) >= self.max_batch_size or left <= 0:
                share = -(-len(company) // (self.lanes - self._computing))
                batch = company[: min(share, self.max_batch_size)]
                taken = set(map(id, batch))
                self._waiting = [entry for entry in self._waiting if id(entry) not in taken]
                return batch
            with suppress(TimeoutError):
                await self._next_arrival(left)

    async def _next_arrival(self, timeout_s: float | None) -> None:
        async with asyncio.timeout(timeout_s):
            await self._arrival.wait()
        self._arrival.clear()

    async def _compute(self, batch: list[_Entry[Item, Result]]) -> None:
        """Runs a batch and hands the results out. Raises nothing but a cancel."""
        try:
            results = await self._in_thread(self.forward, [entry.item for entry in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{type(self).__name__} made {len(results)} results of {len(batch)} items")
        except Exception as error:
            if is_fatal(error):  # else each job that comes would fail here, and sooner than elsewhere
                die(self.stage.engine)
            if len(batch) == 1:
                batch[0].fail(error)
            else:
                await self._one_by_one(batch)
        else:
            for entry, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    entry.fail(result)
                elif not entry.future.done():
                    entry.future.set_result(result)

    async def _one_by_one(self, batch: list[_Entry[Item, Result]]) -> None:
        """One of the items spoils the batch, and only by itself does it show which."""
        for entry in batch:
            if not entry.future.done():
                await self._compute([entry])

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _give_up(batch: Sequence[_Entry[Any, Any]]) -> None:
    """Cancels what is not done: nothing, unless the engine stops.

    A function, because a loop's variable would outlive the loop there and hold the last item, and with it a
    block of shared memory, for as long as nothing else comes.
    """
    for entry in batch:
        entry.future.cancel()


class _Entry(Generic[Item, Result]):
    """An item on its way."""

    __slots__ = ("arrived", "future", "item", "key")

    def __init__(self, item: Item, key: Hashable) -> None:
        loop = asyncio.get_running_loop()
        self.item = item
        self.key = key
        self.arrived = loop.time()
        self.future: asyncio.Future[Result] = loop.create_future()

    def fail(self, error: Exception) -> None:
        """The item's error, unless its job has gone."""
        if not self.future.done():
            self.future.set_exception(error)
