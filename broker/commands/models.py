"""`omni-broker models`: what there is, and fetching it before it is needed."""

from __future__ import annotations

from typing import Annotated

import typer

from broker.commands.common import errors_in_words

app = typer.Typer(no_args_is_help=True, help="List and fetch models.")


@app.command("list")
def list_() -> None:
    """List the models that have a name here, and say which are cached."""
    from rich.console import Console
    from rich.table import Table

    from pipelines.models import cache_dir, list_models

    table = Table(box=None, pad_edge=False)
    table.add_column("model", no_wrap=True)  # it is what `pull` wants
    for head in ("what", "licence", "size", "cached"):
        table.add_column(head)
    for info in list_models():
        megabytes = info.bytes / 1e6 if info.cached else info.model.megabytes
        model = info.model
        how = "" if info.cached else " to fetch" if model.package else " to make"
        size = f"{megabytes:.0f} MB{how}"
        table.add_row(model.name, model.what, model.licence, size, "yes" if info.cached else "no")
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a pipe has no width: don't cut lines for it
    console.print(table)
    typer.echo(f"Cache: {cache_dir()}. Hugging Face ids and folders work too, in a pipeline's `model`.")


@app.command()
def pull(names: Annotated[list[str], typer.Argument(help="Models by name.", metavar="NAME...")]) -> None:
    """Fetch models, convert them, and keep them in the cache."""
    from pipelines.models import pull as pull_model
    from pipelines.progress import Console

    progress = Console()
    with errors_in_words():
        try:
            paths = [pull_model(name, progress) for name in names]
        finally:
            progress.close()
    for path in paths:
        typer.echo(path)
