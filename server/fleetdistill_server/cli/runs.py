"""`fleetdistill runs cancel | delete`: commands that end a run for good."""

from __future__ import annotations

from typing import Annotated

import typer

from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    ServerOption,
    StoreOption,
    counted,
    one_sentence,
    open_store,
)
from fleetdistill_server.cli.remote import connect
from fleetdistill_server.store.run_names import no_such_run
from fleetdistill_server.views.units import readable_bytes

YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@one_sentence
def runs_cancel(
    run: str, store: StoreOption = DEFAULT_STORE, server: ServerOption = None, identity: IdentityOption = None
) -> None:
    """Ends a run for good, also while it is served. Example: fleetdistill runs cancel digits

    Devices keep their models and are told that the run is over. `[run] start_from` begins another run with its model.
    """
    from fleetdistill_server.engine.cancelling import cancel

    if server is not None:
        with connect(server, identity) as remote:
            done = remote.cancel(run)
    else:
        done = cancel(open_store(store), run)
    typer.echo(f"run {run!r} is cancelled" if done else f"run {run!r} was over already")


@one_sentence
def runs_delete(run: str, store: StoreOption = DEFAULT_STORE, yes: YesOption = False) -> None:
    """Deletes a run that is not served, with its model. Example: fleetdistill runs delete digits --yes"""
    from fleetdistill_server.service.run_endings import delete

    opened = open_store(store)
    row = opened.runs.get(run)
    if row is not None and not yes:
        what = f"{row['status']}, {counted(row['completed_rounds'], 'completed round')}"
        typer.confirm(f"Delete run {run!r} ({what}) with its model, receipts and figures?", abort=True)
    gone = delete(store, opened, run)
    if row is None:
        typer.echo(f"{no_such_run(run, opened.runs.names())}; nothing to delete")
        return
    rows = f"{counted(gone.rounds, 'round')}, {counted(gone.events, 'event')}, {counted(gone.figures, 'figure')}"
    typer.echo(f"run {run!r} is deleted: {rows}, {_files(gone.freed.payloads, gone.freed.bytes)}")
    if gone.later.payloads:
        files = _files(gone.later.payloads, gone.later.bytes)
        typer.echo(f"{files} written within the hour: left to the server, which deletes them later")


def _files(payloads: int, size: int) -> str:
    return f"{counted(payloads, 'payload')} ({readable_bytes(size)})"
