"""`fleetdistill device`: a command of the SDK, listed among the commands of the server.

`start.main` calls it directly, so that a device does not need this package's dependencies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleetdistill.device.command import main
from fleetdistill_server.cli.options import JsonOption

device_app = typer.Typer(no_args_is_help=True, help="Inspects or erases the state directory of a device.")

_StateDirectory = Annotated[Path, typer.Argument(help="State directory, as in Device(state_dir=...).")]


@device_app.command("inspect")
def device_inspect(
    state_dir: _StateDirectory,
    as_json: JsonOption = False,
    entries: Annotated[int, typer.Option(help="Number of newest messages to list.")] = 10,
) -> None:
    """Shows what a state directory contains and what was sent. Example: fleetdistill device inspect fleet-state"""
    options = ["--entries", str(entries), *(["--json"] if as_json else [])]
    raise typer.Exit(main(["inspect", str(state_dir), *options]))


@device_app.command("forget")
def device_forget(
    state_dir: _StateDirectory,
    server: Annotated[str | None, typer.Option(help="Server of the run, HOST:PORT; by default the app's last.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Only erase; do not ask the server.")] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plain text to another machine.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Erases a device, and asks the server to delete its data. Example: fleetdistill device forget fleet-state"""
    flags = [flag for flag, given in (("--local", local), ("--insecure", insecure), ("--yes", yes)) if given]
    raise typer.Exit(main(["forget", str(state_dir), *(["--server", server] if server else []), *flags]))
