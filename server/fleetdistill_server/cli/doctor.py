"""`fleetdistill doctor` and `fleetdistill health`.

`doctor` says what is wrong with a server or a device, and what to do. `health` makes one call to a server, for health
checks of containers and for monitors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.cli.options import IdentityOption, JsonOption, report_errors


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
        result = of_device.examine(state, server)
    else:
        from fleetdistill_server.cli.server_checks import examine

        assert config is not None
        result = examine(config, quick=quick, insecure=insecure)
    raise typer.Exit(of_device.show(result, as_json=as_json))


@report_errors
def health(
    server: Annotated[str, typer.Argument(help="host:port of the server.")],
    ca: Annotated[
        Path | None,
        typer.Option(help="The server's ca.pem: checks the enrolment port of a server with TLS, without an identity."),
    ] = None,
    identity: IdentityOption = None,
    service: Annotated[str, typer.Option(help="Only this service, such as fleetdistill.engine.")] = "",
) -> None:
    """Exits with 0 if a server works. Example: fleetdistill health localhost:50052 --ca fleetdistill-pki/ca.pem

    In plain text, or with --identity on the server's main port, front, database, engines and disk must work. With --ca
    the enrolment port must answer with the server's certificate, which is all that it tells anyone.
    """
    from fleetdistill_server.operations.health import check_health

    typer.echo(f"{server} {check_health(server, ca=ca, identity=identity, service=service)}")
