"""What every test of every folder is held to: it works in folders of its own and leaves nothing behind."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import uvloop
import zmq
from hypothesis import HealthCheck, settings

from pipelines.telemetry import no_telemetry
from scripts.leftovers import files_in
from tests.house import House, empty_house
from tests.leftovers import children, descriptors, descriptors_above, resident_mb, until

GROWN_MB = 512  #: more than that after a test is taken for garbage
GONE_S = 20.0  #: processes and sockets that are being closed get so long

# How long an example takes is no property of ours: a machine may stand still in the middle of one.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

no_telemetry()  # of libraries that the tests import themselves: it opens files for good


@pytest.fixture(scope="session", autouse=True)
def _descriptors_of_libraries() -> None:
    """ZeroMQ and libuv open descriptors at their first use and keep them: they are no test's leak."""
    zmq.Context.instance().socket(zmq.DEALER).close()
    with zmq.Context.instance().socket(zmq.PAIR) as one, zmq.Context.instance().socket(zmq.PAIR) as other:
        one.bind("inproc://without-copying")
        other.connect("inproc://without-copying")
        one.send(bytes(1 << 20), copy=False)
        other.recv()
    uvloop.new_event_loop().close()


@pytest.fixture(scope="session")
def _resident() -> list[int]:
    """MiB of memory in use after the last collection."""
    return [resident_mb()]


@pytest.fixture(autouse=True)
def _no_garbage(_resident: list[int]) -> Iterator[None]:
    """Engines that a test has stopped are cycles of few objects, so Python would keep gigabytes of them."""
    yield
    if resident_mb() > _resident[0] + GROWN_MB:
        gc.collect()
        _resident[0] = resident_mb()


@pytest.fixture(autouse=True)
def leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sets fresh folders for runs and for shared memory; at the end both are as empty as before.

    Nor may child processes or open descriptors be left that were not there before.
    """
    with tempfile.TemporaryDirectory(prefix="omni-test-", dir="/dev/shm") as name:
        folder = Path(name)
        for variable, sub in (("OMNI_RUN_DIR", "run"), ("OMNI_SHM_DIR", "shm"), ("OMNI_STATE_DIR", "state")):
            monkeypatch.setenv(variable, str(folder / sub))
            (folder / sub).mkdir(mode=0o700)
        young, opened = children(), descriptors()
        yield folder
        until(lambda: children() <= young, "child processes to end", GONE_S)
        with suppress(AssertionError):  # the one below says what is left
            until(lambda: not files_in(folder), "files to be removed", GONE_S)
        assert files_in(folder) == []
        until(lambda: not descriptors_above(opened), "descriptors to be closed", GONE_S)


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch, leaves_nothing: Path) -> Iterator[Callable[..., House]]:
    """Makes houses; options, if there are any, start one right away (see :meth:`House.start`).

    Clients in the test's own process belong to the house that was made last.
    """
    with ExitStack() as stack:

        def build(*options: str, ready: bool = True, env: dict[str, str] | None = None) -> House:
            home = stack.enter_context(empty_house(env))
            monkeypatch.setenv("OMNI_SHM_DIR", str(home.shm_dir))
            if options:
                home.start(*options, ready=ready)
            return home

        yield build


@pytest.fixture(scope="session")
def _echo() -> Iterator[House]:
    with empty_house() as home:
        home.start("--pipeline", "echo")
        yield home


@pytest.fixture
def echo(_echo: House, monkeypatch: pytest.MonkeyPatch, leaves_nothing: Path) -> House:
    """A house that serves `echo` to all tests which do it no harm that it does not get over by itself.

    Each finds it with a worker in every stage.
    """
    _echo.until(_echo.is_ready)
    monkeypatch.setenv("OMNI_SHM_DIR", str(_echo.shm_dir))
    return _echo
