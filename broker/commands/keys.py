"""`omni-broker keys`: makes the keys with which workers and clients on other machines join."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from broker.commands.common import errors_in_words


def keys(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Where to. Default: ~/.config/omni-broker/keys.", show_default=False),
    ] = None,
) -> None:
    """Make the keys that TCP connections need.

    They are a pair for the broker, and one for all workers and clients.
    """
    from broker.address import default_keys_dir
    from broker.keys import make

    chosen = (folder or default_keys_dir()).expanduser().absolute()
    with errors_in_words():
        make(chosen)
    typer.echo(f"""Keys are in {chosen}, readable by you alone. Nobody but the broker needs server.key_secret.

The broker:              omni-broker start --listen tcp://0.0.0.0:5555 --keys {chosen}
Every other machine:     copy server.key and client.key_secret into a folder of its own, then
                         chmod go= FOLDER FOLDER/*
                         omni-worker --broker tcp://HOST:5555 --keys FOLDER --stage STAGE
                         OMNI_KEYS=FOLDER omni-broker status --broker tcp://HOST:5555""")
