"""``omni-worker``: adds a worker for one stage to a running broker."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from broker import shadow

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def _level(text: str) -> str:
    if text.upper() not in LEVELS:
        raise typer.BadParameter(f"one of {', '.join(LEVELS)}")
    return text.upper()


def worker(  # noqa: PLR0917 - the options of a command line
    stage: Annotated[str, typer.Option(help="The stage to work for, for example `talker`.")],
    pipeline: Annotated[str, typer.Option(help="Its pipeline; needed when the broker serves several.")] = "",
    broker: Annotated[
        str | None,
        typer.Option(help="The broker: ipc:///folder or tcp://host:port. Default: the one on this machine."),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="The folder of keys for a broker at tcp://, see `omni-broker keys`.",
            envvar="OMNI_KEYS",
            file_okay=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="What to run on: cpu, cuda:0, ...")] = "cpu",
    patience: Annotated[
        float, typer.Option(help="Seconds to wait for a broker that does not answer.", min=0)
    ] = 10.0,
    data_host: Annotated[
        str | None,
        typer.Option(
            help="This machine's address at which other machines read tensors made here; beyond loopback it "
            "needs keys. Default: the one that reaches the broker, where that is on another machine.",
            envvar="OMNI_DATA_HOST",
        ),
    ] = None,
    drain_s: Annotated[
        float,
        typer.Option(
            help="Seconds to finish what it holds when it is told to leave; then it is ended.", min=0
        ),
    ] = 30.0,
    health_file: Annotated[
        Path | None,
        typer.Option(
            help="A file that says each second how the worker is: starting, ready, no-broker or draining.",
            dir_okay=False,
        ),
    ] = None,
    mooncake_master: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of the broker's Mooncake master, where it has another address from here."
        ),
    ] = None,
    mooncake_transfer_buffer_size: Annotated[
        int | None,
        typer.Option(help="MiB for tensors on their way to and from Mooncake. Default: the broker's.", min=1),
    ] = None,
    log_level: Annotated[str, typer.Option(help=f"{', '.join(LEVELS)}.", callback=_level)] = "INFO",
    stop_with_stdin: Annotated[
        bool, typer.Option("--stop-with-stdin", help="Leave when standard input ends.", hidden=True)
    ] = False,
) -> None:
    """Adds a worker for one stage to a running broker.

    It joins at once and gets work as soon as its model is loaded. Ctrl-C or SIGTERM: it finishes what it
    holds, then leaves; a second one ends it at once.
    """
    from adapters.process import leave_with_stdin
    from broker.address import AddressError
    from workers.guardian import Guardian, GuardianError

    if stop_with_stdin:
        leave_with_stdin()
    if keys is not None:
        os.environ["OMNI_KEYS"] = str(keys.absolute())  # the engine's process needs them too
    given = {"master": mooncake_master, "buffer_mib": mooncake_transfer_buffer_size}
    mooncake = {name: value for name, value in given.items() if value is not None}
    logging.basicConfig(level=log_level, format="%(message)s", stream=sys.stderr)
    try:
        guardian = Guardian(
            stage,
            pipeline,
            broker,
            device,
            drain_s=drain_s,
            health=health_file,
            data_host=data_host,
            mooncake=mooncake,
        )
        asyncio.run(guardian.run(patience))
    except (GuardianError, AddressError) as error:
        typer.echo(f"omni-worker: {error}", err=True)
        raise typer.Exit(2) from None


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(worker)


def main() -> None:
    """The console script."""
    problem = shadow.find()
    if problem is not None:
        typer.echo(f"omni-worker: {problem}", err=True)
        sys.exit(2)
    app(prog_name="omni-worker")


if __name__ == "__main__":
    main()
