"""`fleetdistill conformance`, listed among the commands of the server; `start.main` calls `__main__` directly."""

from __future__ import annotations

from typing import Annotated

import typer

from fleetdistill_lab.conformance.__main__ import main


def conformance(
    server: Annotated[str | None, typer.Argument(metavar="HOST:PORT", help="Play devices against this server.")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Play a server against a device; 127.0.0.1:0 for any port.")
    ] = None,
    run_toml: Annotated[bool, typer.Option("--run-toml", help="Print the run that a server must serve.")] = False,
    seconds: Annotated[float, typer.Option(help="Maximum duration.")] = 300.0,
) -> None:
    """Checks a server or a device against the wire format. Example: fleetdistill conformance 127.0.0.1:50051"""
    words = [*([server] if server else []), *(["--listen", listen] if listen else []), *(["--run-toml"] * run_toml)]
    raise typer.Exit(main([*words, "--seconds", str(seconds)]))
