"""`fleetdistill backup` and `restore`: copies of a whole store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    ServerOption,
    StoreOption,
    report_errors,
)
from fleetdistill_server.operations.client import open_source
from fleetdistill_server.texts import counted
from fleetdistill_server.views.results import backed_up


@report_errors
def backup(
    out: Annotated[Path, typer.Argument(help="Directory of the backup; it must be empty or not exist.")],
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
) -> None:
    """Backs up a store, even while a server uses it. Example: fleetdistill backup /backups/today

    With --server, an operator copies the backup to this machine. An interrupted copy begins again. The exit status is 1
    if the store has lost payloads; the backup has all others.
    """
    with open_source(store, server, identity) as source:
        made = source.back_up(out)
    for item in made.lost:
        typer.echo(f"warning: not in the backup: {item}", err=True)
    if made.missing > len(made.lost):
        typer.echo(f"warning: and {counted(made.missing - len(made.lost), 'more payload')}", err=True)
    typer.echo(f"{out}: {backed_up(made.payloads, made.bytes, made.missing)}")
    if made.missing:
        raise typer.Exit(1)


@report_errors
def restore(
    backup: Annotated[Path, typer.Argument(help="Directory created by `fleetdistill backup`.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Restores a store from a backup. Example: fleetdistill restore /backups/today --store fleetdistill-store"""
    from fleetdistill_server.store.backup import restore as make_store

    payloads = make_store(backup, store)
    restored = f"{store}: {counted(payloads, 'payload')} and the database"
    typer.echo(f"{restored}; a server whose [server] store is this directory continues from the backup")
