"""The engine process: pulls tasks from the broker, runs them on the stage's engine, sends their chunks.

Started by a guardian (:mod:`workers.guardian`), which hands over a :class:`workers.config.EngineConfig`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import uvloop

from adapters.arena import SharedMemory
from adapters.chunk import Payload, body_fields, find_nonfinite, pack, pack_wait, unpack
from adapters.handle import AdapterError, ArenaFull, Chunk
from adapters.let_go import let_go
from adapters.store import open_store
from broker.abroad import Abroad
from broker.address import AddressError
from broker.protocol import (
    VERSION,
    Assign,
    Beat,
    Bye,
    Cancel,
    Checkpoint,
    Drain,
    Failed,
    Finish,
    Free,
    Grant,
    Hosts,
    Input,
    Message,
    Ready,
    Reject,
    Resume,
    Seen,
    Took,
    Welcome,
    Who,
    decode_to_worker,
)
from broker.session import EngineSession, Result
from broker.wire import MOST_BODY, Connection
from pipelines.telemetry import no_telemetry
from workers import config
from workers.engine import Engine, ItemError, Job
from workers.engines import make_engine
from workers.failures import failure, is_known
from workers.inputs import Inputs
from workers.running import Running

log = logging.getLogger("worker")

decode_params = msgspec.msgpack.Decoder(dict[str, Any]).decode


class WorkerProcess:
    """Feeds one engine."""

    def __init__(self, settings: config.EngineConfig, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.stage = settings.pipeline.stages[settings.stage]
        self.arena = SharedMemory(settings.run, store=open_store(settings.store) if settings.store else None)
        self.abroad = Abroad(settings.run, self.arena)
        self.session = EngineSession(settings.boot)
        self.running: dict[tuple[int, int, int], Running] = {}  #: by (request, stage, attempt)
        self.draining = False
        self._order = settings.pipeline.order()
        self._kept = settings.pipeline.kept(settings.stage) if settings.store else {}
        self._started = False
        self._byes = 0  #: not answered yet
        self._leaving = False  #: the last Bye is under way
        self.done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.connection = Connection(
            settings.endpoint,
            settings.worker,
            decode_to_worker,
            self._on_message,
            self.session.released,
            on_broken=self._on_broken,
        )
        self._in_doubt = False  #: the connection has ended, perhaps because the broker did
        self._handlers: dict[type, Any] = {
            Assign: self._on_assign,
            Input: self._on_input,
            Cancel: self._on_cancel,
            Grant: self._on_grant,
            Seen: self._on_seen,
            Free: self._on_free,
            Drain: self._on_drain,
            Reject: self._on_reject,
            Welcome: self._on_welcome,
            Who: self._on_who,
            Hosts: self.abroad.learn,
        }

    def ready(self) -> None:
        """Reports for work; to be called when the engine has started."""
        self._started = True
        self.connection.post(self._ready())

    def _ready(self) -> Ready:
        capacity, leases = self.stage.batch.max_num_seqs, self.session.leases()
        return Ready(
            VERSION,
            self.settings.guardian,
            capacity,
            os.getpid(),
            self.arena.prefix,
            self.engine.resumes,
            leases,
            self.session.results_seen,
        )

    def drain(self) -> None:
        """Takes nothing new; :attr:`done` is set when what is in hand is finished."""
        self._bye()  # answered by Drain: nothing more is under way to us then

    def _bye(self) -> None:
        self._byes += 1
        self.connection.post(Bye())

    def _result(self, message: Result) -> None:
        """Sends a result, and keeps it until the broker has it in its journal."""
        self.session.sent(message)
        self.connection.post(message)

    def _on_message(self, message: Any) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)

    def _on_drain(self, message: Drain) -> None:
        self._byes -= 1
        if self._leaving and self._byes <= 0:
            self.done.set()
        self.draining = True
        self._leave_if_empty()

    def _leave_if_empty(self) -> None:
        """Says Bye once more: its answer means that the broker has read all our results.

        The guardian reports our end over another connection, which must not overtake them.
        """
        if self.draining and not self.running and not self._leaving:
            self._leaving = True
            self._bye()

    def _on_reject(self, message: Reject) -> None:
        log.error("the broker refuses this worker: %s", message.reason)
        self.done.set()

    def _on_welcome(self, message: Welcome) -> None:
        self.session.met(message.boot)

    def _on_broken(self) -> None:
        """Asks who is there now: where it is the broker that we knew, messages were lost."""
        if self._started:
            self._in_doubt = True
            self.connection.post(Beat())

    def _on_who(self, message: Who) -> None:
        same = message.boot == self.session.boot
        act = self.session.introduce(message)
        if same and self._in_doubt:
            log.error(
                "the connection to the broker broke, and what was under way is lost; another worker starts"
            )
            self.done.set()
        elif act == "gone":
            log.warning("the broker took this worker for dead")
            self.done.set()
        elif act == "introduce" and self._started:
            self._in_doubt = False
            self._introduce()

    def _introduce(self) -> None:
        """Reports to a broker that was restarted; jobs go on meanwhile."""
        introduction: list[Message] = [self._ready(), *self.session.unseen(), self.session.resync()]
        leaves = self.draining or self._byes > 0
        if leaves:
            introduction.append(Bye())
        self._byes = int(leaves)
        for running in self.running.values():
            if running.inputs is not None:
                running.inputs.settle()
        self.connection.restart(introduction)

    def _on_seen(self, message: Seen) -> None:
        self.session.seen(message.results)

    def _on_free(self, message: Free) -> None:
        self.session.freed(message.blocks)
        for block in message.blocks:
            self.arena.free(block)

    def _on_assign(self, message: Assign) -> None:
        self.session.assigned(message)
        running = Running(message)

        def took(edge: int, chunks: int, nbytes: int) -> None:
            self.connection.post(Took(*running.name, edge, chunks, nbytes))

        running.inputs = Inputs(
            self.settings.pipeline,
            message.inputs,
            self.arena,
            self.abroad,
            released=self.connection.released,
            took=took,
        )
        self.running[running.name] = running
        running.task = self._loop.create_task(self._run(running))

    def _on_input(self, message: Input) -> None:
        if not self.session.fed(message):
            log.error(
                "inputs of a task are missing: the connection to the broker broke; another worker starts"
            )
            self.done.set()
            return
        running = self._find(message)
        if running is None or running.inputs is None:
            for chunk in message.input.chunks:  # the job has ended before this came
                self.connection.release(chunk)
        else:
            running.inputs.feed(message.input)

    def _on_cancel(self, message: Cancel) -> None:
        running = self._find(message)
        if running is None or running.cancelled or running.task is None:
            return
        running.cancelled = True
        if running.job is not None:
            running.job.cancelled = True
        if running.begun:  # before its first step a task would run none of its clean-up
            running.task.cancel()

    def _on_grant(self, message: Grant) -> None:
        running = self._find(message)
        if running is not None:
            running.grant(message.chunks, message.nbytes)

    def _find(self, message: Input | Cancel | Grant) -> Running | None:
        return self.running.get((message.request, message.stage, message.attempt))

    async def _run(self, running: Running) -> None:
        """One attempt, from its inputs to its last message; nothing escapes but the process's own end."""
        assign = running.assign
        failed: Failed | None = None
        running.begun = True
        try:
            if running.cancelled:
                raise asyncio.CancelledError
            job = running.job = await self._make_job(running)
            await self._emit_all(running, job)
        except asyncio.CancelledError as error:
            failed = Failed(*running.name, "cancelled")
            let_go(error)
        except Exception as error:
            if not is_known(error):
                log.exception("request %d failed", assign.request)
            failed = failure(running.name, self.settings.stage, error)
            let_go(error)
        del self.running[running.name]
        if running.inputs is not None:
            running.inputs.close()
        running.job = running.inputs = None  # breaks a cycle: views of input tensors must go at once
        if failed is not None:
            self._result(failed)
        self._leave_if_empty()

    async def _make_job(self, running: Running) -> Job:
        assign = running.assign
        resume = assign.resume
        state = await self._state(resume)
        assert running.inputs is not None

        async def checkpoint(state: Payload) -> None:
            chunk = await self._pack(running, state)
            self._result(Checkpoint(*running.name, chunk))
            self._drop_copies(running.replaced(chunk))

        return Job(
            f"{assign.request}/{self.settings.stage}/{assign.attempt}",
            running.inputs.ends(),
            decode_params(assign.params),
            assign.seed,
            attempt=assign.attempt,
            emitted=running.seq,
            resumed=[body_fields(body) for body in resume.bodies] if resume else None,
            resume_state=state,
            checkpoint=checkpoint,
            consumers=frozenset(self._order[number] for number in assign.consumers),
        )

    async def _state(self, resume: Resume | None) -> Payload | None:
        """What an earlier attempt's engine has left. None also when it is lost: the job can do without."""
        if resume is None or resume.checkpoint is None:
            return None
        chunk, released = resume.checkpoint, self.connection.released
        try:
            if self.abroad.foreign(chunk):
                chunk = await self.abroad.land(chunk, released)
            return unpack(chunk, self.arena, released)
        except (AdapterError, AddressError) as error:  # the second: keys that can't be used
            log.warning("a checkpoint can't be read, so its job starts anew: %s", error)
            return None

    async def _emit_all(self, running: Running, job: Job) -> None:
        skip = 0 if self.engine.resumes else running.seq
        payloads = self.engine.run(job)
        try:
            async for payload in payloads:
                if skip:
                    skip -= 1  # an earlier attempt got this one out
                    continue
                await self._emit(running, payload)
        finally:
            if isinstance(payloads, AsyncGenerator):  # it may be in the middle: it stops before we say so
                await payloads.aclose()
        if running.last is not None and self.connection.waits(running.last):
            running.last.chunk.last = True  # rides on the chunk: one message less
        else:
            self._result(Finish(*running.name, running.seq))

    async def _emit(self, running: Running, payload: Payload) -> None:
        if self.stage.check_finite and (field := find_nonfinite(payload)) is not None:
            raise ItemError(f"its output {field} holds NaN or infinity")
        await running.granted()
        self._result(running.emitted(await self._pack(running, payload)))

    async def _pack(self, running: Running, payload: Payload) -> Chunk:
        name = running.assign.name
        if any(self._kept.values()) and name:
            chunk = await pack_wait(payload, running.seq, self.arena, name=name, **self._kept)
        else:
            try:
                chunk = pack(payload, running.seq, self.arena)
            except ArenaFull:
                chunk = await pack_wait(payload, running.seq, self.arena, name=name)
        if len(chunk.body) > MOST_BODY:  # the broker would end the connection
            for handle in chunk.handles:
                self.arena.free(handle.block)
            self._drop_copies(chunk)
            size, most = len(chunk.body) >> 20, MOST_BODY >> 20
            raise ItemError(f"a payload has {size} MiB besides large tensors, and may have {most}")
        return chunk

    def _drop_copies(self, checkpoint: Chunk | None) -> None:
        """A checkpoint that nobody will ask for: its copies would stay until the request's end."""
        for handle in checkpoint.handles if checkpoint is not None else ():
            if handle.copy and self.arena.store is not None:
                self.arena.store.unlink(handle.copy)


async def work(settings: config.EngineConfig) -> int:
    """Loads the engine and serves until told to stop. Returns the exit code."""
    engine = make_engine(settings)
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
    process.abroad.close()
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
