"""Shared parts of the commands: options and error handling."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import typer

from fleetdistill.errors import ConfigurationError, FleetDistillError, in_words
from fleetdistill.printable import printable
from fleetdistill_server.extras import PACKAGES, missing_of_command
from fleetdistill_server.operations.source import UNREADABLE

__all__ = [
    "DEFAULT_STORE",
    "IdentityOption",
    "ImportOption",
    "JsonOption",
    "RunArgument",
    "ServerOption",
    "StoreOption",
    "TrackOption",
    "parse_duration",
    "report_errors",
]

P = ParamSpec("P")
R = TypeVar("R")

StoreOption = Annotated[Path, typer.Option("--store", help="Directory of the store ([server] store in run.toml).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RunArgument = Annotated[str, typer.Argument(help="Name of the run.")]
ServerOption = Annotated[
    str | None, typer.Option("--server", help="host:port of a server with TLS, to be used instead of a local store.")
]
IdentityOption = Annotated[
    Path | None,
    typer.Option("--identity", help="Directory with your identity for --server, from `fleetdistill pki issue`."),
]
ImportOption = Annotated[
    list[str] | None,
    typer.Option("--import", help="Module that registers your own methods, such as package.module; repeatable."),
]
TrackOption = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="mlflow:URI|tensorboard:DIR",
        help="Copy each round's figures to an MLflow server or to event files for TensorBoard; repeatable.",
    ),
]
DEFAULT_STORE = Path("fleetdistill-store")
_UNITS = {"d": 86_400.0, "h": 3600.0, "m": 60.0}


def report_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Decorates a command: a FleetDistillError is printed to standard error as one sentence, with exit status 1.

    A command with --identity but without --server is refused, because it would use the store on this machine.
    """

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if kwargs.get("identity") is not None and kwargs.get("server") is None:
                raise ConfigurationError("--identity needs --server; add --server host:port, or remove --identity")
            return command(*args, **kwargs)
        except typer.Abort as error:  # a question that was answered with no, or that nobody could answer
            typer.echo("\nerror: not confirmed, so nothing was changed; --yes confirms it without a question", err=True)
            raise typer.Exit(1) from error
        except FleetDistillError as error:
            typer.echo(f"error: {printable(str(error))}", err=True)
            raise typer.Exit(1) from error
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in PACKAGES:
                raise
            typer.echo(f"error: {missing_of_command(command.__name__, package)}", err=True)
            raise typer.Exit(1) from error
        except UNREADABLE as error:
            if kwargs.get("server") is None:
                raise
            text = f"the reply of {kwargs['server']} cannot be shown: {in_words(error)}"
            typer.echo(f"error: {printable(text)}; use the version of the server", err=True)
            raise typer.Exit(1) from error

    return wrapped


def parse_duration(option: str, span: str) -> float:
    """Converts a duration such as 30d, given as an option, to seconds. Raises ConfigurationError if it is invalid."""
    number, unit = span[:-1], span[-1:]
    if unit not in _UNITS or not (number.isascii() and number.isdecimal()):
        raise ConfigurationError(f"{option} is {span!r}, expected a number followed by d, h or m, such as 30d")
    return int(number) * _UNITS[unit]
