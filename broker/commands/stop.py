"""`omni-broker stop`: ends the broker of this run folder, and waits until it is gone."""

from __future__ import annotations

import os
import signal
import time

import typer

from broker.commands.common import FAILED, say

PATIENCE_S = 60.0
SILENT_S = 2.0  #: longer waits say so


def stop() -> None:
    """Stop the broker that runs here.

    Workers finish what they hold, then everything ends.
    """
    from broker.address import run_dir
    from broker.supervisor import running_pid

    folder = run_dir()
    try:
        pid = running_pid(folder)
    except OSError as error:
        say(f"can't look into the run folder {folder}: {error.strerror}; another is named with OMNI_RUN_DIR")
        raise typer.Exit(FAILED) from None
    if pid is None:
        say(f"no broker runs here (run folder {folder}; another is named with OMNI_RUN_DIR)")
        raise typer.Exit(FAILED)
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just gone by itself
    except PermissionError:
        say(f"process {pid} is somebody else's")
        raise typer.Exit(FAILED) from None
    begin = time.monotonic()
    told = False
    while running_pid(folder) == pid:
        waited = time.monotonic() - begin
        if waited > PATIENCE_S:
            say(f"process {pid} is still there after {PATIENCE_S:.0f} s; `kill -KILL {pid}` ends everything")
            raise typer.Exit(FAILED)
        if waited > SILENT_S and not told:
            told = True
            say("workers finish what they hold ...")
        time.sleep(0.05)
    say("stopped")
