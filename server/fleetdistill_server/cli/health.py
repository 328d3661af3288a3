"""`fleetdistill health`: one call to a server, for health checks of containers and for monitors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleetdistill_server.cli.options import IdentityOption, report_errors


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
