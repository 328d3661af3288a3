"""`fleetdistill dashboard`: shows the runs of a store or a server in a browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fleetdistill_console.dashboard.server import DEFAULT_PORT, run_dashboard, show_simulation
from fleetdistill_server.cli.options import DEFAULT_STORE, IdentityOption, ServerOption, StoreOption, report_errors
from fleetdistill_server.extras import require


@report_errors
def dashboard(
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    listen: Annotated[
        str, typer.Option(help="Host to listen on, without a port; other than loopback only with --server.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.", min=0, max=65535)] = DEFAULT_PORT,
    title: Annotated[str, typer.Option(help="Title of every page.")] = "fleetdistill",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token for opening the pages; by default a new one is printed.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Host name under which browsers open the pages, if it is not --listen; repeatable."),
    ] = None,
) -> None:
    """Shows runs in a browser; operators can change them. Example: fleetdistill dashboard --store fleetdistill-store

    Ctrl-C stops it. It needs no access to the internet, and the server that it shows keeps running.
    """
    check_installed()
    run_dashboard(
        store,
        server,
        identity,
        host=listen,
        port=port,
        title=title,
        token_file=token_file,
        names=name or [],
        on_listening=_say,
    )


def check_installed() -> None:
    """Raises ConfigurationError if the packages of the pages are missing."""
    require("the dashboard", "nicegui", "dashboard")


def open_simulation(out: Path) -> None:
    """Shows the run of a finished simulation in the browser until Ctrl-C."""

    def show(address: str) -> None:
        _say(address)
        webbrowser.open(address)

    show_simulation(out, show)


def _say(address: str) -> None:
    typer.echo(f"the dashboard is at {address}; press Ctrl-C to stop")
