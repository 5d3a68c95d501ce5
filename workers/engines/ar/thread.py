"""The engine's thread: it alone touches the model, the scheduler and the memory."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workers.engines.ar.family import Step
from workers.engines.ar.schedule import Scheduler
from workers.engines.ar.sequence import AHEAD, Sequence
from workers.engines.vllm_thread import EXIT_ENGINE_DEAD
from workers.optional import library

if TYPE_CHECKING:
    from workers.engines.ar.runner import Runner

log = logging.getLogger("engine")


class ArThread:
    """Steps while there is something to compute, sleeps otherwise. Commands are obeyed between two steps.

    Args:
        build: Loads everything, on the thread.
        company_s: How long a step waits for running jobs that have nothing to compute yet, since the next row
            of their streaming edge has not come. It costs about the same for one job as for all.
    """

    runner: Runner  #: after :meth:`start`
    scheduler: Scheduler

    def __init__(self, build: Callable[[], tuple[Runner, Scheduler]], company_s: float = 0.0) -> None:
        self._build = build
        self._company_s = company_s
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ar", daemon=True)

    async def start(self) -> None:
        """Raises what building raises."""
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._started

    async def stop(self) -> None:
        """Ends the thread after the step in hand."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function on the thread. Raises what it raises."""
        answer: asyncio.Future[Any] = self._loop.create_future()

        def command() -> None:
            try:
                result = function(*arguments)
            except Exception as error:
                self._call(_settle, answer, None, error)
            else:
                self._call(_settle, answer, result, None)

        self._commands.put(command)
        return await answer

    def add(self, sequence: Sequence) -> None:
        """A job to compute; its sink gets the steps."""
        self._commands.put(lambda: self.scheduler.add(sequence))

    def remove(self, sequence: Sequence) -> None:
        """Nobody wants the rest of it; its memory is free before the next step."""
        self._commands.put(lambda: self.scheduler.remove(sequence))

    def feed(self, sequence: Sequence, rows: list[Any], *, ended: bool) -> None:
        """Further rows of a streaming edge, [hidden] each."""

        def command() -> None:
            sequence.rows += rows
            sequence.rows_ended = ended

        self._commands.put(command)

    def took(self, sequence: Sequence) -> None:
        """A step of the job was looked at. One that waited for this goes on."""
        sequence.taken += 1
        if sequence.made - sequence.taken == AHEAD - 1:
            self._commands.put(lambda: None)

    # --- on the thread

    def _work(self) -> None:
        try:
            torch = library("torch", "cpu")
            with torch.inference_mode():
                self.runner, self.scheduler = self._build()
        except BaseException as error:
            self._call(_settle, self._started, None, error)
            return
        self._call(_settle, self._started, None, None)
        try:
            with torch.inference_mode():
                self._serve()
        except BaseException:
            log.critical("the engine failed, so this process ends", exc_info=True)
            logging.shutdown()
            os._exit(EXIT_ENGINE_DEAD)

    def _serve(self) -> None:
        idle = False
        while self._obey(None if idle else 0.0) and self._gather():
            pieces = self.scheduler.plan()
            idle = not pieces
            if idle:
                continue
            outcome = self.runner.step(pieces)
            for sequence, result in outcome.items():
                if isinstance(result, Exception) or result.finish is not None:
                    self.scheduler.remove(sequence)
            if outcome:
                self._call(_deliver, outcome)

    def _gather(self) -> bool:
        """Waits for company. False: stop."""
        if not self._company_s:
            return True
        until = time.monotonic() + self._company_s
        while self.scheduler.scattered and (left := until - time.monotonic()) > 0:
            if not self._obey(left):
                return False
        return True

    def _obey(self, wait_s: float | None) -> bool:
        """Follows all waiting commands, and waits so long for the first; None: for ever. False: stop."""
        while True:
            try:
                command = self._commands.get(block=wait_s != 0, timeout=wait_s)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait_s = 0.0

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: the process ends, and nobody listens
            log.debug("nobody listens to the engine any more")


def _settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)


def _deliver(outcome: dict[Sequence, Step | Exception]) -> None:
    for sequence, result in outcome.items():
        sequence.sink.put_nowait(result)
