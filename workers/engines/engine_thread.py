"""A thread of an engine's own: it alone touches the model, and obeys between two steps.

Libraries keep per-thread state (CUDA's current device, memory policy, OpenMP pool), and a model that computes
must not hold up the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

#: The process's exit code when an engine's thread has failed. Its guardian starts a new one.
EXIT_ENGINE_DEAD = 70

log = logging.getLogger("engine")


class EngineThread(ABC):
    """Loads a model, then serves until it is told to stop. Commands come from the event loop."""

    def __init__(self, name: str) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    async def start(self) -> None:
        """Loads. Raises what loading raises."""
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._started

    async def stop(self) -> None:
        """Ends the thread after the step in hand."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function on the thread, between two steps. Raises what it raises, unless that is fatal."""
        answer: asyncio.Future[Any] = self._loop.create_future()

        def command() -> None:
            try:
                result = function(*arguments)
            except Exception as error:
                if is_fatal(error):
                    raise
                self.tell(_settle, answer, None, error)
            else:
                self.tell(_settle, answer, result, None)

        self.command(command)
        return await answer

    def command(self, function: Callable[[], None]) -> None:
        """Runs a function on the thread, between two steps. What it raises ends the process."""
        self._commands.put(function)

    # --- on the thread

    @abstractmethod
    def load(self) -> None:
        """Loads the model."""

    @abstractmethod
    def serve(self) -> None:
        """Steps, and obeys between two steps, until :meth:`obey` says to stop. An error ends the process."""

    def obey(self, wait_s: float | None) -> bool:
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

    def tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function on the event loop."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: the process ends, and nobody listens
            log.debug("nobody listens to the engine any more")

    def _work(self) -> None:
        try:
            self.load()
        except BaseException as error:
            self.tell(_settle, self._started, None, error)
            return
        self.tell(_settle, self._started, None, None)
        try:
            self.serve()
        except BaseException:
            die(self._thread.name)


def die(engine: str) -> NoReturn:
    """Ends the process for the error that is being handled."""
    log.critical("the engine %s failed, so this process ends", engine, exc_info=True)
    logging.shutdown()
    os._exit(EXIT_ENGINE_DEAD)


def is_fatal(error: BaseException) -> bool:
    """After an error of the device, nothing that this process computes can be trusted."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def _settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
