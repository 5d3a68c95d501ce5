"""The guardian of one worker: starts the engine process, beats for it, reports its death, starts another.

A light process: an engine may hold the interpreter for seconds without being taken for dead, since the
guardian beats for it, and one that is killed is known dead at once, since the guardian waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

from adapters.handle import AdapterError
from adapters.mooncake_client import adapted
from adapters.process import describe_exit, dies_with_parent, end_group, ended, python, send_signal
from adapters.segment import shm_dir
from broker.address import cure, endpoints, state_dir
from broker.protocol import (
    VERSION,
    Beat,
    Bye,
    Died,
    Drain,
    Hello,
    Kill,
    Message,
    Peer,
    Reject,
    Welcome,
    Who,
    decode_to_worker,
    new_peer,
)
from broker.session import Session
from broker.wire import Connection
from workers import config
from workers.health import HealthFile
from workers.hosting import Hosting
from workers.old_chunks import sweep_chunks

log = logging.getLogger("guardian")

FIRST_PAUSE_S = 0.1  #: before the second start in a row
LONGEST_PAUSE_S = 30.0
SETTLED_S = 20.0  #: an engine that lived so long starts the pauses anew
DRAIN_S = 30.0  #: an engine that drains gets so long
HEALTH_S = 1.0  #: how often the health file is written
#: Engines keep memory that they free, where it is no more than this: else glibc gives a step's large tensors
#: back to the kernel at once, and the next step has all their pages made anew, which took a fifth of the
#: processor time of a picture. See mallopt(3), which takes no larger threshold than the first.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
SILENCE_S = 6.0  #: without a beat of the broker for so long, nobody gives us work


class GuardianError(Exception):
    """The guardian can't do its work; the message says why and what to do."""


class Engine:
    """One engine process and what the guardian knows of it."""

    def __init__(self, process: Process, peer: Peer) -> None:
        self.process = process
        self.peer = peer
        self.started = time.monotonic()
        self.cause = ""  #: why we killed it, if we did
        self.last_lines: deque[str] = deque(maxlen=3)


class Guardian:
    """Keeps one worker of a stage alive.

    Args:
        stage: The stage's name.
        pipeline: The pipeline's name; "" if the broker serves just one.
        address: The broker's, or None for the run folder.
        device: What the engine runs on, for example "cpu" or "cuda:0".
        drain_s: How long the engine may take to finish what it holds when it is to leave.
        mooncake: How this host uses the broker's Mooncake, where that differs: fields of
            :class:`adapters.mooncake_client.Address`.
        health: A file that says how the worker is, see :class:`workers.health.HealthFile`.
    """

    def __init__(
        self,
        stage: str,
        pipeline: str = "",
        address: str | None = None,
        device: str = "cpu",
        *,
        drain_s: float = DRAIN_S,
        health: Path | None = None,
        data_host: str | None = None,
        mooncake: dict[str, Any] | None = None,
    ) -> None:
        self.stage = stage
        self.pipeline = pipeline
        self.device = device
        self._drain_s = drain_s
        self._mooncake = mooncake or {}
        self._health = None if health is None else HealthFile(health)
        self._heard = 0.0  #: the broker's last beat
        self._ready: list[Peer] = []  #: our engines that were ready then
        self._address = address
        self._endpoint = endpoints(address).workers
        self._hosting = Hosting(self._endpoint, data_host, self._post)
        self._engine: Engine | None = None
        self._session = Session()
        self._welcome: Welcome | None = None
        self._welcomed: asyncio.Future[Welcome]
        self._connection: Connection
        self._stop = asyncio.Event()
        self._leave_now = asyncio.Event()

    async def run(self, patience_s: float = 10.0) -> None:
        """Works until told to stop. Raises GuardianError when the broker is absent or refuses."""
        self._welcomed = asyncio.get_running_loop().create_future()
        self._connection = Connection(self._endpoint, new_peer("g"), decode_to_worker, self._on_message)
        self._hello()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        beating = None
        telling = None if self._health is None else asyncio.ensure_future(self._tell(self._health))
        try:
            if not await self._is_welcomed(patience_s):
                return
            beating = asyncio.ensure_future(self._beat())
            threading.Thread(target=_tidy, daemon=True).start()
            await self._keep_alive()
            await self._hosting.linger(self._drain_s, self._broker_is_there, self._leave_now)
        finally:
            for task in (beating, telling):
                if task is not None:
                    task.cancel()
            if self._health is not None:
                self._health.remove()
            self._connection.post(Bye())
            self._connection.close()
            self._hosting.close(sweeps=not self._broker_is_there())

    def _post(self, message: Message) -> None:
        self._connection.post(message)

    def _broker_is_there(self) -> bool:
        return time.monotonic() - self._heard < SILENCE_S

    def _hello(self) -> None:
        names = VERSION, self.pipeline, self.stage, socket.gethostname()
        self._connection.post(Hello(*names, os.getpid(), self.device, *self._hosting.place()))

    async def _is_welcomed(self, patience_s: float) -> bool:
        """Waits for the broker. False: told to stop before. Raises GuardianError."""
        told = asyncio.ensure_future(self._stop.wait())
        either: set[asyncio.Future[Any]] = {self._welcomed, told}
        await asyncio.wait(either, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if self._welcomed.done():
            self._welcomed.result()
        elif not self._stop.is_set():
            raise GuardianError(f"no broker answers at {self._endpoint}; {cure(self._endpoint)}")
        return self._welcomed.done()

    # --- the broker

    def _on_message(self, message: Any) -> None:
        kind = type(message)
        if kind is Beat:
            self._heard, self._ready = time.monotonic(), message.workers
        elif kind is Welcome:
            self._on_welcome(message)
        elif kind is Reject:
            self._refuse(message.reason)
        elif kind is Who:
            self._on_who(message)
        elif kind is Kill:
            if self._engine is not None and self._engine.peer == message.worker:
                self._kill(self._engine, message.cause)
            else:
                self._connection.post(Died(message.worker, "it is gone"))  # its death was not heard
        elif kind is Drain:
            self._stop.set()
        elif kind in self._hosting.handlers:
            self._hosting.handlers[kind](message)

    def _refuse(self, reason: str) -> None:
        """We can't take part."""
        if self._welcomed.done():
            log.error("the broker refuses this worker: %s", reason)
            self._leave_now.set()
            self._stop.set()
        else:
            self._welcomed.set_exception(GuardianError(reason))

    def _on_who(self, who: Who) -> None:
        """Reports again to a broker that was restarted, and keeps the engine, which does so by itself."""
        act = self._session.introduce(who)
        if act == "ignore":
            return
        if act == "gone" and self._engine is not None:  # what it does has been given to others
            self._kill(self._engine, "killed: the broker had given its guardian up")
        self._hello()

    def _on_welcome(self, welcome: Welcome) -> None:
        self._session.met(welcome.boot)
        self._heard = time.monotonic()
        known, self._welcome = self._welcome, welcome
        try:
            self._hosting.begin(welcome, self._store)
        except (GuardianError, AdapterError, ValueError, OSError) as error:
            self._refuse(f"this host's memory can't be served: {error}")
            return
        if self._hosting.untold:
            self._hello()
        if not self._welcomed.done():
            self._welcomed.set_result(welcome)
        elif known is not None and known.run != welcome.run and self._engine is not None:
            self._kill(self._engine, "killed: its broker began anew")

    async def _beat(self) -> None:
        assert self._welcome is not None
        while True:
            self._connection.post(Beat([self._engine.peer] if self._engine else []))
            self._hosting.hold()
            if self._hosting.untold:
                self._hello()
            await asyncio.sleep(self._welcome.beat_s)

    async def _tell(self, health: HealthFile) -> None:
        while True:
            health.write(self._state())
            await asyncio.sleep(HEALTH_S)

    def _state(self) -> str:
        if self._stop.is_set():
            return "draining"
        if time.monotonic() - self._heard > SILENCE_S:
            return "no-broker" if self._welcomed.done() else "starting"
        ready = self._engine is not None and self._engine.peer in self._ready
        return "ready" if ready else "starting"

    # --- the engine

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._leave_now.set()  # the second signal: no more patience
        self._stop.set()

    async def _keep_alive(self) -> None:
        pause = 0.0
        while not self._stop.is_set():
            try:
                engine = self._engine = await self._start()
            except (OSError, SubprocessError) as error:  # no memory, no process, no file is left for it
                pause = _longer(pause)
                log.warning("%s's engine can't be started (%s); again in %g s", self.stage, error, pause)
                await self._sleep(pause)
                continue
            cause = await self._watch(engine)
            self._engine = None
            self._connection.post(Died(engine.peer, cause))
            if self._stop.is_set():
                return
            lived = time.monotonic() - engine.started
            pause = 0.0 if lived > SETTLED_S else _longer(pause)
            self._complain(engine, cause, pause)
            await self._sleep(pause)

    async def _start(self) -> Engine:
        assert self._welcome is not None
        peer = new_peer("w")
        welcome = self._welcome
        settings = config.EngineConfig(
            self._endpoint,
            peer,
            self._connection.peer,
            welcome.run,
            welcome.pipeline,
            self.stage,
            self.device,
            welcome.boot,
            self._hosting.store,
        )
        process = await asyncio.create_subprocess_exec(
            *python("workers.worker"),
            stdin=PIPE,
            stderr=PIPE,
            env={**MALLOC, **os.environ},
            preexec_fn=dies_with_parent(new_group=True),
        )
        engine = Engine(process, peer)
        assert process.stdin is not None
        process.stdin.write(config.encode(settings))
        process.stdin.close()
        return engine

    def _store(self, text: str) -> str:
        """The broker's store, as it is reached from here. Raises ValueError where that can't be."""
        return adapted(text, **self._mooncake) if self._mooncake else text

    async def _watch(self, engine: Engine) -> str:
        """Until the engine's process is gone; gives the cause of its death."""
        reading = asyncio.ensure_future(self._read_log(engine))
        stopping = asyncio.ensure_future(self._stop.wait())
        exiting = asyncio.ensure_future(ended(engine.process))
        await asyncio.wait((stopping, exiting), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not exiting.done():
            await self._drain(engine)
        code = await exiting
        end_group(engine.process.pid)  # its own children, such as a model server's
        await asyncio.wait((reading,), timeout=1.0)
        reading.cancel()
        return engine.cause or describe_exit(code)

    async def _drain(self, engine: Engine) -> None:
        """Asks the engine to finish what it holds, and ends it when that takes too long."""
        send_signal(engine.process, signal.SIGTERM)
        exiting = asyncio.ensure_future(ended(engine.process))
        hurry = asyncio.ensure_future(self._leave_now.wait())
        await asyncio.wait((exiting, hurry), timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not exiting.done():
            self._kill(engine, "killed: it did not leave in time")
            await exiting

    def _kill(self, engine: Engine, cause: str) -> None:
        engine.cause = cause
        send_signal(engine.process, signal.SIGKILL)

    async def _read_log(self, engine: Engine) -> None:
        """Passes the engine's log on, under its name, and keeps the end for a report of its death."""
        assert engine.process.stderr is not None
        pipeline = self._welcome.pipeline.name if self._welcome else self.pipeline
        name = f"{pipeline}/{self.stage}"
        while True:
            try:
                line = await engine.process.stderr.readline()
            except ValueError:  # longer than asyncio's limit of 64 KiB
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            engine.last_lines.append(text)
            log.info("[%s %d] %s", name, engine.process.pid, text)

    def _complain(self, engine: Engine, cause: str, pause: float) -> None:
        last = f"; it said last: {engine.last_lines[-1]}" if engine.last_lines else ""
        when = f"in {pause:g} s" if pause else "now"
        log.warning(
            "%s's engine %d died (%s)%s; another starts %s", self.stage, engine.process.pid, cause, last, when
        )

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return


def _longer(pause: float) -> float:
    """The pause after this one, in seconds."""
    return min(max(FIRST_PAUSE_S, pause * 2), LONGEST_PAUSE_S)


def _tidy() -> None:
    """On a thread: what runs that are over have left here may be a lot."""
    try:
        for path in sweep_chunks(state_dir(), shm_dir()):
            log.info("removed %s, left by a run that is over", path)
    except OSError as error:
        log.warning("chunks of runs that are over stay: %s", error)
