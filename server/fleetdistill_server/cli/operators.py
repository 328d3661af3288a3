"""`fleetdistill operators`: what operators and local commands have changed."""

from __future__ import annotations

from typing import Annotated

import typer

from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    JsonOption,
    ServerOption,
    StoreOption,
    open_console,
    report_errors,
)
from fleetdistill_server.operations.source import open_source
from fleetdistill_server.views.operators import table
from fleetdistill_server.views.runs import View


@report_errors
def operators(
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    call: Annotated[str, typer.Option(help="Only calls of this method, such as RevokeDevice.")] = "",
    text: Annotated[str, typer.Option(help="Only calls whose caller, arguments, address or result contain this.")] = "",
    before: Annotated[int | None, typer.Option(help="Only calls older than the one with this id.")] = None,
    most: Annotated[int, typer.Option(help="Largest number of calls, 1 to 1000.")] = 200,
    as_json: JsonOption = False,
) -> None:
    """Lists operators' calls, newest first: changes and refused calls. Example: fleetdistill operators --text alice

    The privacy audit of a run is `fleetdistill audit`.
    """
    with open_source(store, server, identity) as source:
        found = source.operators(before=before, call=call, text=text, most=most)
    if as_json:
        typer.echo(View(found.lists).json())
        return
    console = open_console()
    console.print(table(found.lists["operators"], console.width))
    if found.facts["more"]:
        typer.echo(f"there are older calls: --before {found.lists['operators'][-1]['id']}")
