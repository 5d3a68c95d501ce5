"""The gateway's settings as options of a command, out of the one list of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from broker.gateway.settings import Option, options

Command = Callable[..., None]


def with_gateway_settings(command: Command) -> Command:
    """Adds an option for each gateway setting that the command has none for. It gets them by keyword."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = {parameter.name for parameter in own}
    more = [_parameter(option) for option in options() if option.name not in names]
    command.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    return command


def _parameter(option: Option) -> inspect.Parameter:
    """Typer's notion of an option; a list's default is None, since its help says what that means."""
    kind: Any = list[str] | None if option.kind is list else option.kind
    default = None if option.kind is list else option.default
    declared = typer.Option(option.flag, help=option.help)
    annotation = Annotated[kind, declared]
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
