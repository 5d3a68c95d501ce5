"""A broker of one's own: started for a Python program, ended with it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from adapters.sweep import sweep
from broker.address import AddressError, make_run_dir
from broker.client import BrokerGone, Client

SILENT_S = 2.0  #: longer waits are explained
EXPLAIN_EVERY_S = 10.0
STOP_S = 45.0
LOG_LINES = 15


class OmniError(Exception):
    """The broker can't be started or reached; the message says why, with the log's end where there is one."""


class PrivateBroker:
    """`omni-broker start` without a gateway, in a run folder of its own.

    It ends when :meth:`stop` is called, and also when this process ends in any way: it watches a pipe that
    the kernel closes then.

    Args:
        pipeline: A name or a file.
        stage: Settings as `--stage` takes them.
        model: As `--model` takes it.
    """

    def __init__(self, pipeline: str, stage: Sequence[str] = (), model: str | None = None) -> None:
        self._folder = _folder()
        self.address = f"ipc://{self._folder}"
        self._log = self._folder / "log.txt"
        command = ["broker.cli", "start", "--pipeline", pipeline, "--no-gateway", "--stop-with-stdin"]
        for setting in stage:
            command += ["--stage", setting]
        if model is not None:
            command += ["--model", model]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "OMNI_RUN_DIR": str(self._folder),
                    "OMNI_STATE_DIR": str(self._folder / "state"),
                },
                start_new_session=True,  # Ctrl-C is for the program, which then stops us
            )

    async def ready(self, client: Client, timeout_s: float) -> None:
        """Connects the client, and waits until every stage has a worker.

        Raises OmniError when the broker ends before that, or after `timeout_s`.
        """
        begin = time.monotonic()
        explained = begin + SILENT_S - EXPLAIN_EVERY_S
        missing: list[str] | None = None
        while True:
            if self._process.poll() is not None:
                code = self._process.returncode
                raise OmniError(f"the broker ended with exit code {code}; it said:\n{self._last_lines()}")
            if missing is None:
                try:
                    await client.connect(0.5)
                    missing = []
                except BrokerGone:
                    pass  # not up yet
            else:
                # It may be being restarted, or models that are loaded leave it no time.
                with suppress(BrokerGone):
                    report = await client.inspect("ready")
                    missing = [name for name in report["missing"] if _kept(client, name)]
                    if not missing:
                        return
            now = time.monotonic()
            what = ", ".join(missing) if missing else "the broker"
            if now - begin > timeout_s:
                raise OmniError(f"{what} not ready after {timeout_s:g} s; the log:\n{self._last_lines()}")
            if now - explained > EXPLAIN_EVERY_S:
                explained = now
                print(
                    f"omni-broker: waiting for {what} ({now - begin:.0f} s; log: {self._log})",
                    file=sys.stderr,
                )
            await asyncio.sleep(0.1)

    def _last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-LOG_LINES:])

    def stop(self) -> None:
        """Ends it, and removes its folder. Blocks until workers have finished what they hold."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children die with it
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        sweep()  # what a broker that had not heard our farewell has kept for its next start


def _kept(client: Client, name: str) -> bool:
    """Whether workers are kept for a stage ("pipeline/stage"); with no replicas they come by hand."""
    pipeline, _, stage = name.partition("/")
    return client.pipelines[pipeline].stages[stage].resources.least > 0


def _folder() -> Path:
    """A new run folder. Raises OmniError when temporary folders lie too deep for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="omni-"))
    try:
        return make_run_dir(folder)
    except AddressError:
        folder.rmdir()
        raise OmniError(f"{folder} is too long for a socket's path; set TMPDIR to a shorter one") from None
