"""`fleetdistill doctor`: says in words what is wrong with a server or a device, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.cli.options import JsonOption, report_errors


@report_errors
def doctor(
    config: Annotated[Path | None, typer.Argument(help="Path of run.toml or server.toml, to examine a server.")] = None,
    state: Annotated[Path | None, typer.Option(help="State directory of a device, to examine the device.")] = None,
    server: Annotated[str | None, typer.Option(help="host:port of the device's server; default: the last one.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not compare every payload with its digest.")] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="As for serve: plain text is wanted.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Finds out what is wrong with a server or a device. Example: fleetdistill doctor run.toml

    Changes nothing and works beside a running server or device. The exit status is 1 if there is an error.
    """
    from fleetdistill.device import doctor as of_device

    if (config is None) == (state is None):
        raise ConfigurationError("give either a run.toml or server.toml, or --state with a device's directory")
    if state is not None:
        found = of_device.examine(state, server)
    else:
        from fleetdistill_server.cli.server_checks import examine

        assert config is not None
        found = examine(config, quick=quick, insecure=insecure)
    raise typer.Exit(of_device.show(found, as_json=as_json))
