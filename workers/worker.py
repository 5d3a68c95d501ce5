"""The engine process: pulls tasks from the broker, runs them on the stage's engine, sends their chunks.

Started by a guardian (:mod:`workers.guardian`), which hands over a :class:`workers.config.EngineConfig`.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import signal
import sys
from typing import Any

import msgspec
import uvloop

from adapters.arena import SharedMemory
from adapters.chunk import Payload, body_fields, find_nonfinite, pack, pack_wait, unpack
from adapters.handle import AdapterError, ArenaFull
from broker.protocol import (
    VERSION,
    Assign,
    Bye,
    Cancel,
    Checkpoint,
    Drain,
    EdgeInput,
    Emit,
    Error,
    Failed,
    Finish,
    Free,
    Input,
    Ready,
    Reject,
    Who,
    decode_to_worker,
)
from broker.wire import Connection
from pipelines.options import ENGINES
from workers import config
from workers.engine import Engine, ItemError, Job
from workers.inputs import Inputs
from workers.optional import no_telemetry

log = logging.getLogger("worker")

decode_params = msgspec.msgpack.Decoder(dict[str, Any]).decode


class Running:
    """One job in hand."""

    __slots__ = ("assign", "cancelled", "early", "inputs", "job", "last", "seq", "task")

    def __init__(self, assign: Assign) -> None:
        self.assign = assign
        self.seq = 0
        self.last: Emit | None = None  #: the newest chunk, while it may still wait in the outbox
        self.inputs: Inputs | None = None  #: None until the task has run its first step
        self.early: list[EdgeInput] = []  #: what came before that, in one frame with the assignment
        self.cancelled = False  #: likewise
        self.job: Job | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def name(self) -> tuple[int, int, int]:
        """(request, stage, attempt), the head of every message about it."""
        return (self.assign.request, self.assign.stage, self.assign.attempt)


class WorkerProcess:
    """Feeds one engine."""

    def __init__(self, settings: config.EngineConfig, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.stage = settings.pipeline.stages[settings.stage]
        self.arena = SharedMemory(settings.run)
        self.running: dict[tuple[int, int, int], Running] = {}  #: by (request, stage, attempt)
        self.draining = False
        self._leaving = False  #: the last Bye is under way
        self.done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.connection = Connection(settings.endpoint, settings.worker, decode_to_worker, self._on_message)
        self._handlers: dict[type, Any] = {
            Assign: self._on_assign,
            Input: self._on_input,
            Cancel: self._on_cancel,
            Free: self._on_free,
            Drain: self._on_drain,
            Reject: self._on_reject,
            Who: self._on_who,
        }

    def ready(self) -> None:
        """Reports for work; to be called when the engine has started."""
        capacity = self.stage.batch.max_num_seqs
        guardian, prefix = self.settings.guardian, self.arena.prefix
        self.connection.post(Ready(VERSION, guardian, capacity, os.getpid(), prefix, self.engine.resumes))

    def drain(self) -> None:
        """Takes nothing new; :attr:`done` is set when what is in hand is finished."""
        self.connection.post(Bye())  # answered by Drain: nothing more is under way to us then

    def _on_message(self, message: Any) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)

    def _on_drain(self, message: Drain) -> None:
        if self._leaving:
            self.done.set()
        self.draining = True
        self._leave_if_empty()

    def _leave_if_empty(self) -> None:
        """Says Bye once more: its answer means that the broker has read all our results.

        The guardian reports our end over another connection, which must not overtake them.
        """
        if self.draining and not self.running and not self._leaving:
            self._leaving = True
            self.connection.post(Bye())

    def _on_reject(self, message: Reject) -> None:
        log.error("the broker refuses this worker: %s", message.reason)
        self.done.set()

    def _on_who(self, message: Who) -> None:
        log.warning("the broker does not know this worker (it was restarted, or took it for dead)")
        self.done.set()

    def _on_free(self, message: Free) -> None:
        for block in message.blocks:
            self.arena.free(block)

    def _on_assign(self, message: Assign) -> None:
        running = Running(message)
        self.running[running.name] = running
        running.task = self._loop.create_task(self._run(running))

    def _on_input(self, message: Input) -> None:
        running = self._find(message)
        if running is None:
            self._release_unused(message)
        elif running.inputs is None:
            running.early.append(message.input)
        else:
            running.inputs.feed(message.input)

    def _on_cancel(self, message: Cancel) -> None:
        running = self._find(message)
        if running is None or running.task is None:
            return
        if running.inputs is None:  # a task that is cancelled before its first step runs none of its clean-up
            running.cancelled = True
            return
        if running.job is not None:
            running.job.cancelled = True
        running.task.cancel()

    def _find(self, message: Input | Cancel) -> Running | None:
        return self.running.get((message.request, message.stage, message.attempt))

    def _release_unused(self, message: Input) -> None:
        """The job has ended before this came: nobody will look at it."""
        for chunk in message.input.chunks:
            for handle in chunk.handles:
                self.connection.released(handle.block)

    async def _run(self, running: Running) -> None:
        """One attempt, from its inputs to its last message; nothing escapes but the process's own end."""
        assign = running.assign
        failed: Failed | None = None
        try:
            job = running.job = self._make_job(running)
            if running.cancelled:
                raise asyncio.CancelledError
            await self._emit_all(running, job)
        except asyncio.CancelledError:
            failed = Failed(*running.name, "cancelled")
        except ItemError as error:
            text = f"stage {self.settings.stage}: {error}"
            failed = Failed(
                *running.name,
                "item",
                Error(
                    "invalid_request_error" if error.status < 500 else "stage_failed",
                    text,
                    error.status,
                    error.param,
                ),
            )
        except ArenaFull as error:
            failed = self._failed(running, "overloaded", error, 503)
        except AdapterError as error:
            failed = self._failed(running, "stage_failed", error, 500)
        except Exception as error:
            log.exception("request %d failed", assign.request)
            failed = self._failed(running, "stage_failed", error, 500)
        del self.running[running.name]
        running.job = running.inputs = None  # breaks a cycle: views of input tensors must go at once
        if failed is not None:
            self.connection.post(failed)
        self._leave_if_empty()

    def _failed(self, running: Running, kind: str, error: Exception, status: int) -> Failed:
        text = f"stage {self.settings.stage}: {type(error).__name__}: {error}"
        return Failed(*running.name, "item", Error(kind, text, status))

    def _make_job(self, running: Running) -> Job:
        assign = running.assign
        resume = assign.resume
        running.inputs = Inputs(self.settings.pipeline, assign.inputs, self.arena, self.connection.released)
        for item in running.early:
            running.inputs.feed(item)
        if resume is not None:
            running.seq = resume.emitted

        def checkpoint(state: Payload) -> None:
            self.connection.post(Checkpoint(*running.name, pack(state, running.seq, self.arena)))

        return Job(
            f"{assign.request}/{self.settings.stage}/{assign.attempt}",
            running.inputs.ends,
            decode_params(assign.params),
            assign.seed,
            attempt=assign.attempt,
            resumed=[body_fields(body) for body in resume.bodies] if resume else None,
            resume_state=unpack(resume.checkpoint, self.arena, self.connection.released)
            if resume and resume.checkpoint
            else None,
            checkpoint=checkpoint,
        )

    async def _emit_all(self, running: Running, job: Job) -> None:
        skip = 0 if self.engine.resumes else running.seq
        payloads = self.engine.run(job)
        async for payload in payloads:
            if skip:
                skip -= 1  # an earlier attempt got this one out
                continue
            await self._emit(running, payload)
        if running.last is not None and self.connection.waits(running.last):
            running.last.chunk.last = True  # rides on the chunk: one message less
        else:
            self.connection.post(Finish(*running.name))

    async def _emit(self, running: Running, payload: Payload) -> None:
        if self.stage.check_finite and (field := find_nonfinite(payload)) is not None:
            raise ItemError(f"its output {field} holds NaN or infinity")
        try:
            chunk = pack(payload, running.seq, self.arena)
        except ArenaFull:
            chunk = await pack_wait(payload, running.seq, self.arena)
        running.seq += 1
        running.last = Emit(*running.name, chunk)
        self.connection.post(running.last)


def find_engine(name: str) -> type[Engine]:
    """The class of a built-in engine's name or of "module:Class"."""
    where = ENGINES[name].implementation if name in ENGINES else name
    module, _, attribute = where.partition(":")
    engine: type[Engine] = getattr(importlib.import_module(module), attribute)
    return engine


async def work(settings: config.EngineConfig) -> int:
    """Loads the engine and serves until told to stop. Returns the exit code."""
    stage = settings.pipeline.stages[settings.stage]
    engine = find_engine(stage.engine)(stage, device=settings.device)
    process = WorkerProcess(settings, engine)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    starting = asyncio.ensure_future(engine.start())
    stopping = asyncio.ensure_future(stop.wait())
    leaving = asyncio.ensure_future(process.done.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        return 0
    await starting
    gc.collect()
    gc.freeze()  # a model's objects stay for life: scanning them again and again would pause the jobs
    process.ready()
    await asyncio.wait((stopping, leaving), return_when=asyncio.FIRST_COMPLETED)
    if not process.done.is_set():
        process.drain()
        await leaving
    await engine.stop()
    process.connection.close()
    return 0


def main() -> None:
    """``python -P -m workers.worker`` with an EngineConfig on standard input."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    no_telemetry()
    settings = config.decode(sys.stdin.buffer.read())
    code = uvloop.run(work(settings))
    # Everything is said and sent by now; threads may hang in foreign code, so do not wait for them.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
