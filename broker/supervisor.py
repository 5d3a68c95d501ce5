"""Runs everything on one machine: broker, gateway, a guardian per worker; restarts what dies.

Children die with the supervisor (prctl), so a killed one leaves no process; what it leaves in the
shared-memory folder is swept at the next start.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from adapters.process import describe_exit, dies_with_parent, end_group, python
from adapters.sweep import sweep
from broker.address import endpoints
from pipelines.devices import gpu_count, place
from pipelines.graph import Pipeline
from pipelines.models import list_models

log = logging.getLogger("supervisor")

LONGEST_PAUSE_S = 2.0  #: between two starts of a process that keeps dying
SETTLED_S = 10.0  #: a process that lived so long is started again at once
DRAIN_S = 35.0  #: workers get so long to finish what they hold
STOP_S = 8.0  #: the gateway and the broker get so long
FRONT_S = 5.0  #: workers start after the gateway has opened its port, or after so long
PULL_RETRY_S = 30.0
API_KEYS = "api-keys"  #: their file in the run folder


class Settings(msgspec.Struct, frozen=True):
    """What to run."""

    pipelines: list[Pipeline]
    run_dir: Path  #: made already, see :func:`broker.address.make_run_dir`
    state_dir: Path | None = None  #: likewise; None: without a journal and a disk store
    sync_s: float = 1.0  #: see :class:`broker.journal.Journal`
    host: str = "127.0.0.1"
    port: int = 8000
    workers: bool = True
    gateway: bool = True
    gateway_options: tuple[str, ...] = ()  #: of its command line, see :mod:`broker.gateway.settings`
    api_keys: tuple[str, ...] = ()  #: lines, see :mod:`broker.gateway.keys`; none: everybody may ask
    listen: str | None = None  #: a TCP address where workers and clients may come in too
    log_level: str = "INFO"


class AlreadyRunning(Exception):
    """Another supervisor holds the run folder, or the state folder. ``pid`` is its process."""

    def __init__(self, pid: int, folder: Path) -> None:
        super().__init__(f"omni-broker runs already (process {pid}); stop it with `omni-broker stop`")
        self.pid = pid
        self.folder = folder


def _lock_file(folder: Path) -> Path:
    return folder / "supervisor.pid"


def running_pid(run_dir: Path) -> int | None:
    """The supervisor that holds the run folder, or None."""
    try:
        with _lock_file(run_dir).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or 0)
    except (FileNotFoundError, NotADirectoryError):
        pass
    return None


@contextmanager
def _hold(folder: Path) -> Iterator[None]:
    """Holds a folder's lock. Raises AlreadyRunning."""
    path = _lock_file(folder)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning(int(file.read() or 0), folder) from None
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield
        path.unlink(missing_ok=True)


class Child:
    """One process that is kept alive.

    Args:
        name: What log lines call it.
        command: Its command line.
        say: Gets each line that it prints.
    """

    def __init__(self, name: str, command: list[str], say: Callable[[str], None]) -> None:
        self.name = name
        self._command = command
        self._say = say
        self._process: Process | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts it, and again whenever it dies, after a pause that grows while it keeps dying."""
        self._task = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        pause = 0.0
        while not self._stopping:
            began = time.monotonic()
            code = await self._run_once()
            if self._stopping:
                return
            lived = time.monotonic() - began
            pause = 0.0 if lived > SETTLED_S else min(max(0.1, pause * 2), LONGEST_PAUSE_S)
            when = f"in {pause:g} s" if pause else "now"
            self._say(f"{self.name} ended ({describe_exit(code)}); it is started again {when}")
            await asyncio.sleep(pause)

    async def _run_once(self) -> int:
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=DEVNULL, stderr=PIPE, preexec_fn=dies_with_parent(new_group=True)
        )
        if self._stopping:  # stop() came while it was being made
            process.terminate()
        assert process.stderr is not None
        async for line in process.stderr:
            self._say(line.decode(errors="replace").rstrip())
        code = await process.wait()
        end_group(process.pid)
        return code

    async def stop(self, patience_s: float) -> None:
        """SIGTERM; SIGKILL to all its group after so long."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
        if self._task is None:
            return
        if self._process is None or (process is not None and process.returncode is not None):
            self._task.cancel()  # it waits before the next start
        done, _ = await asyncio.wait((self._task,), timeout=patience_s)
        if not done and self._process is not None:
            self._say(f"{self.name} did not leave within {patience_s:g} s; it is killed")
            self.kill()
            await asyncio.wait((self._task,), timeout=5.0)

    def kill(self) -> None:
        """SIGKILL, now, with all that it started; it is not started again."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            end_group(self._process.pid)


class Supervisor:
    """All processes of one run."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._address = f"ipc://{settings.run_dir}"
        self._port = settings.port or _free_port(settings.host)  # a gateway that is restarted keeps it
        self._front: list[Child] = []
        self._workers: list[Child] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Until SIGTERM or SIGINT; a second one ends the children without waiting for their work."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        document = self.settings.run_dir / "pipelines.json"
        document.write_bytes(msgspec.json.encode(self.settings.pipelines))
        level = ("--log-level", self.settings.log_level)
        broker = python("broker.server", "--pipelines", str(document), "--address", self._address, *level)
        if self.settings.state_dir is not None:
            broker += ["--state", str(self.settings.state_dir), "--sync", str(self.settings.sync_s)]
        if self.settings.listen is not None:
            broker += ("--listen", self.settings.listen)
        self._front.append(Child("broker", broker, self._say))
        if self.settings.gateway:
            where = ("--host", self.settings.host, "--port", str(self._port))
            more = (*self.settings.gateway_options, *self._write_api_keys())
            gateway = python("broker.gateway", *where, "--address", self._address, *level, *more)
            self._front.append(Child("gateway", gateway, self._say))
        for child in self._front:
            child.start()
        if self.settings.workers:
            await self._front_is_up()
            if not self._stop.is_set():
                self._start_workers()
                self._tasks.append(asyncio.ensure_future(self._announce()))
        await self._stop.wait()
        await self._shut_down()
        document.unlink(missing_ok=True)
        (self.settings.run_dir / API_KEYS).unlink(missing_ok=True)

    def _write_api_keys(self) -> tuple[str, ...]:
        """The gateway's option for the API keys; they go into a file, since all may read command lines."""
        path = self.settings.run_dir / API_KEYS
        path.unlink(missing_ok=True)
        if not self.settings.api_keys:
            return ()
        path.touch(mode=0o600)
        path.write_text("\n".join(self.settings.api_keys))
        return ("--api-keys", str(path))

    async def _announce(self) -> None:
        from broker.announce import announce  # not at the head: the front starts before all else

        kept = {
            f"{pipeline.name}/{name}"
            for pipeline in self.settings.pipelines
            for name, stage in pipeline.stages.items()
            if stage.resources.least
        }
        where = f": http://{self.settings.host}:{self._port}" if self.settings.gateway else ""
        await announce(self._address, kept, where, self._say)

    async def _front_is_up(self) -> None:
        """Waits until the gateway's port is open: it shall answer before models take all cores."""
        if not self.settings.gateway:
            return
        deadline = time.monotonic() + FRONT_S
        while time.monotonic() < deadline and not self._stop.is_set():
            with suppress(OSError):
                _, writer = await asyncio.open_connection(self.settings.host, self._port)
                writer.close()
                return
            await asyncio.sleep(0.02)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
            for child in (*self._workers, *self._front):
                child.kill()
        self._stop.set()

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    async def _shut_down(self) -> None:
        for task in self._tasks:
            task.cancel()
        held = [worker.stop(DRAIN_S) for worker in self._workers]
        if held and not self._hurry.is_set():
            self._say("stopping; workers finish what they hold (Ctrl-C again: at once)")
        await asyncio.gather(*held)
        for child in reversed(self._front):
            await child.stop(STOP_S)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        sweep()  # what processes left that outlived the broker
        self._unlink_sockets()

    def _unlink_sockets(self) -> None:
        """A broker that had to be killed leaves them."""
        for endpoint in endpoints(self._address):
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    # --- workers

    def _start_workers(self) -> None:
        """Starts all workers; those whose model is not here yet as soon as it has been pulled."""
        staged = [(p, name, stage) for p in self.settings.pipelines for name, stage in p.stages.items()]
        places = place([stage for _, _, stage in staged], gpu_count())
        missing = {info.model.name for info in list_models() if not info.cached}
        waiting: dict[str, list[Child]] = {}
        for (pipeline, name, stage), devices in zip(staged, places, strict=True):
            for device in devices:
                worker = self._worker(pipeline, name, device)
                if stage.model in missing:
                    waiting.setdefault(stage.model, []).append(worker)
                else:
                    worker.start()
        for model, workers in waiting.items():
            self._tasks.append(asyncio.ensure_future(self._pull_then_start(model, workers)))

    def _worker(self, pipeline: Pipeline, stage: str, device: str) -> Child:
        where = ("--pipeline", pipeline.name, "--stage", stage, "--broker", self._address, "--device", device)
        command = python("workers.cli", *where, "--log-level", self.settings.log_level, "--patience", "60")
        worker = Child(f"a guardian of {pipeline.name}/{stage}", command, self._say)
        self._workers.append(worker)
        return worker

    async def _pull_then_start(self, model: str, workers: list[Child]) -> None:
        """Fetches a model in a process of its own, and tries again when that fails."""
        while True:
            pull = await asyncio.create_subprocess_exec(
                *python("broker.cli", "models", "pull", model),
                stdin=DEVNULL,
                preexec_fn=dies_with_parent(new_group=True),
            )
            try:
                if await pull.wait() == 0:
                    break
            finally:
                end_group(pull.pid)
            self._say(f"model {model} could not be pulled; trying again in {PULL_RETRY_S:g} s")
            await asyncio.sleep(PULL_RETRY_S)
        for worker in workers:
            worker.start()


def _free_port(host: str) -> int:
    """A TCP port that nobody listens on; 0, so that the gateway finds the words, for a host that is none."""
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family) as probe:
            port: int = probe.getsockname()[1]
            return port
    except OSError:
        return 0


def supervise(settings: Settings) -> int:
    """Runs until stopped; returns the exit code. Raises AlreadyRunning."""
    with ExitStack() as held:
        for folder in filter(None, (settings.run_dir, settings.state_dir)):
            held.enter_context(_hold(folder))
        asyncio.run(Supervisor(settings).run())
    if settings.state_dir is not None and not os.environ.get("OMNI_STATE_DIR"):
        with suppress(OSError):  # it holds something for the next start
            settings.state_dir.rmdir()
    return 0
