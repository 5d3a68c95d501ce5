"""`omni-broker shm`: what lies in the shared-memory folder, and removing what dead runs left there."""

from __future__ import annotations

from typing import Annotated

import typer

from adapters.sweep import RunState
from broker.commands.common import say

MIB = 1 << 20
RUN_STATES: dict[RunState, str] = {
    "alive": "alive",
    "kept": "kept: its broker may come back",
    "dead": "dead",
}

app = typer.Typer(help="List shared memory, and remove what dead processes left.")


@app.callback(invoke_without_command=True)
def _default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_()


@app.command("list")
def list_() -> None:
    """List the segments of all runs of yours.

    This is what `omni-broker shm` does by itself.
    """
    from rich.console import Console
    from rich.table import Table

    from adapters.segment import shm_dir
    from adapters.sweep import segments

    found = sorted(segments(), key=lambda item: (item.run, item.name))
    if found:
        table = Table(box=None, pad_edge=False)
        table.add_column("segment", overflow="fold")
        table.add_column("MiB", justify="right")
        table.add_column("owner")
        table.add_column("run")
        for item in found:
            owner = "alive" if item.owner_alive else "dead"
            table.add_row(item.name, f"{item.bytes / MIB:.1f}", owner, RUN_STATES[item.run_state])
        console = Console()
        if not console.is_terminal:
            console.width = 160  # a pipe has no width: don't cut lines for it
        console.print(table)
    total = sum(item.bytes for item in found)
    typer.echo(f"{_count(len(found), 'segment')}, {total / MIB:.1f} MiB in {shm_dir()}")


@app.command("sweep")
def sweep_(
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Take the segments of kept runs too: those whose broker died and has not come back. What "
            "their unfinished requests had there is lost.",
        ),
    ] = False,
) -> None:
    """Remove the segments of dead runs.

    Those of living ones stay, whatever you say.
    """
    from adapters.segment import shm_dir
    from adapters.sweep import segments, sweep

    kept = {item.run for item in segments() if item.run_state == "kept"}
    if kept and not force:
        say(
            f"left alone: {_count(len(kept), 'kept run')}, whose broker died and may come back to unfinished "
            "requests; --force takes what is kept too"
        )
    if kept and force:
        say(
            f"warning: with {_count(len(kept), 'kept run')}; unfinished requests lose what they had in "
            "shared memory, and fail if they need it when their broker comes back"
        )
    swept = sweep(kept=force)
    total = sum(item.bytes for item in swept)
    typer.echo(f"removed {_count(len(swept), 'file')}, {total / MIB:.1f} MiB from {shm_dir()}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
