"""`omni-broker status`: stages, queues and workers, live in a terminal."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.commands.common import Broker, Keys, errors_in_words, show_whatever_comes, use_keys
from broker.commands.tables import table

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

EVERY_S = 1.0


def status(
    once: Annotated[bool, typer.Option("--once", help="Print it once, also in a terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The broker's whole report, as JSON.")] = False,
    broker: Broker = None,
    keys: Keys = None,
) -> None:
    """Show the stages, their queues and their workers."""
    use_keys(keys)
    show_whatever_comes()
    with errors_in_words():
        if as_json:
            typer.echo(json.dumps(asyncio.run(_report(broker)), indent=2))
        elif once or not sys.stdout.isatty():
            from rich.console import Console

            console = Console()
            if not console.is_terminal:
                console.width = 160  # a pipe has no width: don't cut lines for it
            console.print(_view(asyncio.run(_report(broker)), console.width))
        else:
            try:
                asyncio.run(_live(broker))
            except KeyboardInterrupt:
                return


async def _report(broker: str | None) -> dict[str, Any]:
    from broker.client import Client

    async with Client(broker, kind="cli") as client:
        return await client.inspect("status")


async def _live(broker: str | None) -> None:
    from rich.live import Live

    from broker.client import Client

    async with Client(broker, kind="cli") as client:
        with Live(auto_refresh=False) as live:
            while True:
                report = await client.inspect("status")
                live.update(_view(report, live.console.width), refresh=True)
                await asyncio.sleep(EVERY_S)


def _view(report: dict[str, Any], width: int) -> Group:
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    missing = escape(", ".join(report["missing"]))
    head = "[green]ready[/]" if report["ready"] else f"[yellow]not ready[/]: no worker for {missing}"
    counts, clients = report["tables"], report["clients"]
    kinds = sorted({client["kind"] for client in clients})
    who = ", ".join(f"{sum(c['kind'] == kind for c in clients)} {escape(kind)}" for kind in kinds) or "none"
    foot = (
        f"requests {counts['requests']}, queued {counts['queued']}, running {counts['running']}, "
        f"shared memory {counts['block_bytes'] / 2**20:.1f} MiB in {counts['blocks']} blocks; clients: {who}"
    )
    refused = ", ".join(f"{escape(kind)} {count}" for kind, count in report["refused"].items())
    end = [foot, f"refused: {refused}"] if refused else [foot]
    hosts = report["hosts"]
    if hosts["others"]:
        servers = len({address for addresses in hosts["book"].values() for address in addresses})
        end.append(f"hosts: {len(hosts['others']) + 1}, with {servers} addresses of data servers")
    tables = [_stages(report, width), *_scaling(report), _workers(report, width)]
    return Group(Text.from_markup(head), *tables, *(Text.from_markup(line) for line in end))


def _stages(report: dict[str, Any], width: int) -> Table:
    heads = ["stage", "engine", "queued", "running", "workers", "starting"]
    counts = ["done", "attempts", "failed", "deaths"]
    rows = [
        [
            f"{pipeline}/{name}",
            stage["engine"],
            stage["queued"],
            stage["running"],
            len(stage["workers"]),
            stage["starting"],
            *(stage["tasks"][count] for count in counts),
        ]
        for pipeline, one in report["pipelines"].items()
        for name, stage in one["stages"].items()
    ]
    spare = ("engine", "starting", "attempts", "deaths", "done")
    return table("Stages", [*heads, *counts], rows, width=width, spare=spare)


def _scaling(report: dict[str, Any]) -> list[Table]:
    """Stages with a range of workers, and those that can't have what they should: a table, or none."""
    from rich.markup import escape
    from rich.table import Table

    made = Table(title="Scaling", title_justify="left", box=None, pad_edge=False)
    made.add_column("stage", overflow="fold")
    for name in ("min", "max", "wanted", "present", "queued", "since"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("why")
    for pipeline, one in report["pipelines"].items():
        for name, stage in one["stages"].items():
            told = stage["replicas"]
            if told["min"] == told["max"] and not told["trouble"]:
                continue
            numbers = [told["min"], told["max"], told["wanted"], told["present"], stage["queued"]]
            why = f"{told['why']}; [red]{escape(told['trouble'])}[/]" if told["trouble"] else told["why"]
            made.add_row(f"{pipeline}/{name}", *map(str, numbers), uptime(told["since_s"]), why)
    return [made] if made.rows else []


def _workers(report: dict[str, Any], width: int) -> Table:
    rows = [
        [
            f"{pipeline}/{name}",
            worker["pid"],
            worker["device"],
            "draining" if worker["draining"] else "busy" if worker["running"] else "idle",
            worker["running"],
            uptime(worker["up_s"]),
        ]
        for pipeline, one in report["pipelines"].items()
        for name, stage in one["stages"].items()
        for worker in stage["workers"]
    ]
    heads = ["worker", "pid", "device", "state", "running", "up"]
    return table("Workers", heads, rows, width=width, spare=("running", "up"))


def uptime(seconds: float) -> str:
    """ "42 s", "3 min 5 s" or "2 h 7 min"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
