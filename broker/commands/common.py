"""What all commands share: errors in one line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

FAILED = 1  #: exit code: what was asked for did not work out
USAGE = 2  #: exit code: it can't work as it was asked for

INTERRUPTED = 130  #: exit code: Ctrl-C

MAX_SEED = 2**63 - 1  #: as over HTTP, where :mod:`broker.gateway.schemas` says so
MAX_NUMBER = 2**31 - 1  #: of tokens and steps, likewise


Broker = Annotated[
    str | None, typer.Option(help="ipc:///folder or tcp://host:port. Default: the one running here.")
]
Keys = Annotated[
    Path | None,
    typer.Option(
        help="The folder of keys for TCP, see `omni-broker keys`.", envvar="OMNI_KEYS", file_okay=False
    ),
]


def use_keys(folder: Path | None) -> None:
    """Makes this process and all that it starts use the keys of a folder."""
    if folder is not None:
        os.environ["OMNI_KEYS"] = str(folder.absolute())


def say(text: str) -> None:
    """A line for people, on standard error."""
    typer.echo(f"omni-broker: {text}", err=True)


def show_whatever_comes() -> None:
    """From now on any text can be printed: what the terminal's encoding lacks as "?".

    Where there is no output at all, it goes nowhere. What models say may hold any character.
    """
    if sys.stdout is None:  # `omni-broker ask ... >&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open to the end
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class Enduring:
    """Standard error of what must outlive it: its reader may go, or its disk be full. Lines are lost then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """See io.TextIOBase."""
        with suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """See io.TextIOBase."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def choose(served: Sequence[str], wanted: str, what: str = "pipeline") -> str:
    """The pipeline that is wanted, or the only one. Ends the command where there is no such choice."""
    if wanted in served:
        return wanted
    if not wanted and len(served) == 1:
        return served[0]
    problem = f"no {what}" + (f" {wanted!r}" if wanted else "") + " is served"
    if not wanted and served:
        problem = "several pipelines are served"
    say(f"{problem}; name one with --pipeline: {', '.join(served)}" if served else problem)
    raise typer.Exit(USAGE)


@contextmanager
def errors_in_words() -> Iterator[None]:
    """Ends the command with one line and an exit code where an error's message says it all."""
    from zmq import ZMQError

    from adapters.handle import AdapterError
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
    except (ModelError, BrokerError, OmniError, AdapterError) as error:
        say(str(error))
        raise typer.Exit(FAILED) from None
    except UnicodeEncodeError as error:  # bytes from the command line
        say(f"{error.object[:80]!r} is no text in UTF-8")
        raise typer.Exit(USAGE) from None
    except BrokenPipeError:
        raise  # whoever reads what we print has enough: there is nothing to say
    except ZMQError as error:  # an address that no socket can have
        say(str(error))
        raise typer.Exit(USAGE) from None
    except OSError as error:  # a full disk below the output
        say(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror))
        raise typer.Exit(FAILED) from None
