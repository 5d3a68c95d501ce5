"""`omni-broker start`: the broker, its gateway and its workers, until told to stop."""

from __future__ import annotations

import os
import signal
import threading
from typing import Annotated

import typer

from broker.commands.common import USAGE, say

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def _level(text: str) -> str:
    if text.upper() not in LEVELS:
        raise typer.BadParameter(f"one of {', '.join(LEVELS)}")
    return text.upper()


def start(  # noqa: PLR0917 - the options of a command line
    pipeline: Annotated[
        list[str] | None,
        typer.Option(
            "--pipeline",
            "--omni-stage-config",
            help="A pipeline that ships, a YAML file, or a folder with a pipeline.yaml. Repeat it for more. "
            "Default: voice.",
        ),
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting of one stage, like thinker.max_num_seqs=32; with several pipelines it goes to "
            "each that has the stage, or name one: voice/thinker.max_num_seqs=32. Repeat it for more."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Where the gateway listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port; 0 picks a free one.", min=0, max=65535)] = 8000,
    workers: Annotated[bool, typer.Option(help="Start the stages' workers.")] = True,
    gateway: Annotated[bool, typer.Option(help="Start the HTTP gateway.")] = True,
    log_level: Annotated[str, typer.Option(help=f"{', '.join(LEVELS)}.", callback=_level)] = "INFO",
    stop_with_stdin: Annotated[
        bool, typer.Option("--stop-with-stdin", help="Stop when standard input ends.", hidden=True)
    ] = False,
) -> None:
    """Start a broker, its HTTP gateway and the workers of its pipelines.

    It runs until Ctrl-C, SIGTERM or `omni-broker stop`.
    """
    from broker.address import AddressError, is_loopback, make_run_dir, run_dir
    from broker.supervisor import AlreadyRunning, Settings, supervise
    from pipelines.catalog import DEFAULT_PIPELINE
    from pipelines.checks import check_local_devices
    from pipelines.devices import gpu_count
    from pipelines.errors import PipelineError
    from pipelines.loader import load_all

    if stop_with_stdin:
        threading.Thread(target=_wait_for_end_of_input, daemon=True).start()
    try:
        settings = Settings(
            pipelines=load_all(pipeline or [DEFAULT_PIPELINE], stage or []),
            host=host,
            port=port,
            workers=workers,
            gateway=gateway,
            run_dir=make_run_dir(run_dir()),
            log_level=log_level,
        )
        if workers:
            for loaded in settings.pipelines:
                check_local_devices(loaded, gpu_count())
    except (PipelineError, AddressError) as error:
        say(str(error))
        raise typer.Exit(USAGE) from None
    if gateway and not is_loopback(host):
        say(f"warning: {host} can be reached from other machines, and there is no API key: anybody may ask")
    try:
        code = supervise(settings)
    except AlreadyRunning as error:
        say(
            f"one is running already here (process {error.pid}, run folder {settings.run_dir}); end it with "
            "`omni-broker stop`, or give this one a folder of its own in OMNI_RUN_DIR"
        )
        raise typer.Exit(USAGE) from None
    raise typer.Exit(code)


def _wait_for_end_of_input() -> None:
    """For a parent that may die without a word: the kernel closes its end of the pipe."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
