"""What all commands share: errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

FAILED = 1  #: exit code: what was asked for did not work out
USAGE = 2  #: exit code: it can't work as it was asked for


def say(text: str) -> None:
    """A line for people, on standard error."""
    typer.echo(f"omni-broker: {text}", err=True)


@contextmanager
def errors_in_words() -> Iterator[None]:
    """Ends the command with one line and an exit code where an error's message says it all."""
    from broker.address import AddressError
    from broker.api import OmniError
    from broker.attached import CannotDo
    from broker.client import BrokerError
    from pipelines.errors import ModelError, PipelineError

    try:
        yield
    except (PipelineError, AddressError, CannotDo) as error:
        say(str(error))
        raise typer.Exit(USAGE) from None
    except (ModelError, BrokerError, OmniError) as error:
        say(str(error))
        raise typer.Exit(FAILED) from None
