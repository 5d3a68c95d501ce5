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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from adapters.process import python
from adapters.sweep import sweep
from broker.address import endpoints
from broker.child import Child
from broker.placement import Placer
from broker.placement.apart import Apart
from broker.placement.local import Local
from pipelines.graph import Pipeline

log = logging.getLogger("supervisor")

DRAIN_S = 35.0  #: workers get so long to finish what they hold
STOP_S = 8.0  #: the gateway and the broker get so long
HOPELESS = 2  #: exit code, where something has ended that another start can't help
FRONT_S = 5.0  #: workers start after the gateway has opened its port, or after so long
API_KEYS = "api-keys"  #: their file in the run folder


class Settings(msgspec.Struct, frozen=True):
    """What to run."""

    pipelines: list[Pipeline]
    run_dir: Path  #: made already, see :func:`broker.address.make_run_dir`
    state_dir: Path | None = None  #: likewise; None: without a journal and a disk store
    sync_s: float = 1.0  #: see :class:`broker.journal.Journal`
    store: str = ""  #: a Mooncake's address; "": the disk store in the state folder
    host: str = "127.0.0.1"
    port: int = 8000
    workers: bool = True
    gateway: bool = True
    gateway_options: tuple[str, ...] = ()  #: of its command line, see :mod:`broker.gateway.settings`
    api_keys: tuple[str, ...] = ()  #: lines, see :mod:`broker.gateway.keys`; none: everybody may ask
    listen: str | None = None  #: a TCP address where workers and clients may come in too
    placement: Literal["local", "ray"] = "local"  #: where workers run; "ray" needs ``listen``
    ray_address: str = "auto"  #: of the cluster, for ray.init
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


class Supervisor:
    """All processes of one run."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._address = f"ipc://{settings.run_dir}"
        self._port = settings.port or _free_port(settings.host)  # a gateway that is restarted keeps it
        self._front: list[Child] = []
        self._placer: Placer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._code = 0

    async def run(self) -> int:
        """Until SIGTERM or SIGINT; a second one ends the children without waiting for their work.

        Returns the exit code.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        document = self.settings.run_dir / "pipelines.json"
        document.write_bytes(msgspec.json.encode(self.settings.pipelines))
        level = ("--log-level", self.settings.log_level)
        broker = python("broker.server", "--pipelines", str(document), "--address", self._address, *level)
        if self.settings.state_dir is not None:
            broker += ["--state", str(self.settings.state_dir), "--sync", str(self.settings.sync_s)]
        if self.settings.store:
            broker += ("--store", self.settings.store)
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
                self._placer = self._make_placer(document)
                self._tasks.append(asyncio.ensure_future(self._placer.run()))
                self._tasks.append(asyncio.ensure_future(self._announce()))
        await self._stop.wait()
        await self._shut_down()
        document.unlink(missing_ok=True)
        (self.settings.run_dir / API_KEYS).unlink(missing_ok=True)
        return self._code

    def _make_placer(self, document: Path) -> Placer:
        settings = self.settings
        if settings.placement == "local":
            return Local(settings.pipelines, self._address, settings.log_level, self._say)
        assert settings.listen is not None
        where = ("--pipelines", str(document), "--address", self._address, "--listen", settings.listen)
        more = ("--ray-address", settings.ray_address, "--log-level", settings.log_level)
        return Apart("the Ray placer", python("broker.placement.ray", *where, *more), self._say, self._fail)

    def _fail(self) -> None:
        self._code = HOPELESS
        self._stop.set()

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
            if self._placer is not None:
                self._placer.kill()
            for child in self._front:
                child.kill()
        self._stop.set()

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    async def _shut_down(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._placer is not None:
            if not self._hurry.is_set():
                self._say("stopping; workers finish what they hold (Ctrl-C again: at once)")
            await self._placer.stop(DRAIN_S)
        for child in reversed(self._front):
            await child.stop(STOP_S)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        sweep()  # what processes left that outlived the broker
        self._unlink_sockets()

    def _unlink_sockets(self) -> None:
        """A broker that had to be killed leaves them."""
        for endpoint in endpoints(self._address):
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


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
        code = asyncio.run(Supervisor(settings).run())
    if settings.state_dir is not None and not os.environ.get("OMNI_STATE_DIR"):
        with suppress(OSError):  # it holds something for the next start
            settings.state_dir.rmdir()
    return code
