"""``omni-broker``: start, status, ask, paint, stop, keys, dead-letters, models, shm."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from broker import shadow
from broker.commands import dead_letters, models, shm
from broker.commands.ask import ask
from broker.commands.common import INTERRUPTED, USAGE, say
from broker.commands.keys import keys
from broker.commands.paint import paint
from broker.commands.start import start
from broker.commands.status import status
from broker.commands.stop import stop

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Serve any-to-any models as a graph of stages.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"omni-broker {version('omni-broker')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


for _command in (start, status, ask, paint, stop, keys):
    app.command()(_command)
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(models.app, name="models")
app.add_typer(shm.app, name="shm")


def main() -> None:
    """The console script."""
    problem = shadow.find()
    if problem is not None:
        say(problem)
        sys.exit(USAGE)
    try:
        app(prog_name="omni-broker")
    except KeyboardInterrupt:  # before a command has begun
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
