"""`omni-broker dead-letters`: requests whose attempts are used up, kept with what they were given."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from broker.commands.common import (
    FAILED,
    INTERRUPTED,
    Broker,
    Keys,
    errors_in_words,
    say,
    show_whatever_comes,
    use_keys,
)
from broker.commands.status import uptime

if TYPE_CHECKING:
    from broker.client import Client

ALL = "all"

app = typer.Typer(help="Look at requests that failed for good, and run them again.")

Name = Annotated[str, typer.Argument(help="The request's name, as `list` shows it.")]


@app.callback(invoke_without_command=True)
def _default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_()


@app.command("list")
def list_(broker: Broker = None, keys: Keys = None) -> None:
    """List the dead letters, the oldest first.

    This is what `omni-broker dead-letters` does by itself.
    """
    use_keys(keys)
    show_whatever_comes()
    letters = _ask(broker, "list")["letters"]
    if not letters:
        typer.echo("no dead letters")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)  # it is what the others want
    table.add_column("pipeline")
    table.add_column("stage")
    table.add_column("attempts", justify="right")
    table.add_column("MiB", justify="right")
    table.add_column("failed")
    table.add_column("error")
    for letter in letters:
        table.add_row(
            letter["name"],
            letter["pipeline"],
            letter["stage"] or "-",
            str(letter["attempts"]),
            f"{letter['bytes'] / 2**20:.1f}",
            f"{uptime(letter['age_s'])} ago",
            Text(letter["error"]),  # whatever it says, it is no markup
        )
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a pipe has no width: don't cut lines for it
    console.print(table)


@app.command()
def show(name: Name, broker: Broker = None, keys: Keys = None) -> None:
    """Show all that is known of one, as JSON.

    That is its error, its parameters, and the sizes of what it was given.
    """
    use_keys(keys)
    show_whatever_comes()
    letter = _ask(broker, "show", name)["letter"]
    typer.echo(json.dumps(letter, indent=2, ensure_ascii=False, default=_text))


@app.command()
def retry(name: Name, broker: Broker = None, keys: Keys = None) -> None:
    """Run one again, and wait for its end.

    It gets the same inputs and the same seed. Its outputs are kept for its caller for a while,
    under its name. Interrupted, it goes on.
    """
    use_keys(keys)
    with errors_in_words():
        name.encode()  # as in _ask()
        try:
            asyncio.run(_retry(broker, name))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


@app.command()
def drop(
    name: Annotated[str, typer.Argument(help="The request's name, or `all`.")],
    broker: Broker = None,
    keys: Keys = None,
) -> None:
    """Throw one away with its inputs, or all."""
    use_keys(keys)
    dropped = _ask(broker, "drop", name)["dropped"]
    if not dropped and name != ALL:
        say(f"no dead letter {name!r}")
        raise typer.Exit(FAILED)
    typer.echo(f"dropped {dropped} dead letter{'' if dropped == 1 else 's'}")


def _ask(broker: str | None, act: Literal["list", "show", "drop"], name: str = "") -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        from broker.client import Client

        async with Client(broker, kind="cli") as client:
            return await client.letters(act, name)

    with errors_in_words():
        name.encode()  # what can't be sent is found here, not by the socket
        return _checked(asyncio.run(ask()))


async def _retry(broker: str | None, name: str) -> None:
    from broker.client import Client

    async with Client(broker, kind="cli") as client:
        again = _checked(await client.letters("retry", name))["name"]
        say(f"{again} runs again")
        chunks, seconds = await _follow(client, again)
    told = ", ".join(f"{count} of {output}" for output, count in chunks.items()) or "none"
    typer.echo(f"{again} is done after {seconds:.1f} s; chunks: {told}")


async def _follow(client: Client, name: str) -> tuple[dict[str, int], float]:
    """Waits for a request's end: chunks of each output, and seconds. Raises BrokerError when it fails."""
    begin = asyncio.get_running_loop().time()
    stream = await client.attach(name)
    try:
        chunks = dict.fromkeys(stream.outputs, 0)
        async for output, _ in stream:
            chunks[output] += 1
    finally:
        stream.leave()  # its outputs are its caller's
    return chunks, asyncio.get_running_loop().time() - begin


def _checked(report: dict[str, Any]) -> dict[str, Any]:
    """The broker's answer, unless it is an error: that ends the command."""
    if "error" in report:
        say(report["error"])
        raise typer.Exit(FAILED)
    return report


def _text(value: object) -> str:
    """Bytes in JSON."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
