"""`fleetdistill devices`: lists, revokes and forgets devices."""

from __future__ import annotations

from typing import Annotated

import typer

from fleetdistill_console.tables import show
from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    JsonOption,
    RunArgument,
    ServerOption,
    StoreOption,
    report_errors,
)
from fleetdistill_server.cli.pki import warn_without_server
from fleetdistill_server.operations.client import connect, open_source
from fleetdistill_server.operations.source import LocalStore, open_store

devices_app = typer.Typer(invoke_without_command=True)


@devices_app.callback()
@report_errors
def devices(
    context: typer.Context,
    store: StoreOption = DEFAULT_STORE,
    run: Annotated[str | None, typer.Option(help="List only the devices of this run.")] = None,
    server: ServerOption = None,
    identity: IdentityOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lists the devices that have checked in. Example: fleetdistill devices --run digits"""
    if context.invoked_subcommand is None:
        with open_source(store, server, identity) as source:
            show(source.devices(run), as_json)


@devices_app.command("revoke")
@report_errors
def devices_revoke(
    device: Annotated[str, typer.Argument(help="Id of the device.")],
    reason: Annotated[str, typer.Option(help="Reason for the revocation, to be stored.")] = "",
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Also revoke a device that has never enrolled or checked in.")
    ] = False,
) -> None:
    """Revokes a device permanently, from its next call. Example: fleetdistill devices revoke camera-7"""
    if server is not None:
        with connect(server, identity) as remote:
            revoked = remote.revoke(device, reason, confirmed=yes)
    else:
        open_store(store)
        warn_without_server(store)
        revoked = LocalStore(store).revoke(device, reason, confirmed=yes)
    if not revoked.known:
        text = f"device {device!r} has never enrolled or checked in, and is revoked anyway, permanently. Check the id"
        typer.echo(f"warning: {text}", err=True)
    typer.echo(f"device {device!r} {'is revoked' if revoked.changed else 'was already revoked'}")


@devices_app.command("forget")
@report_errors
def devices_forget(
    run: RunArgument,
    device: Annotated[str, typer.Argument(help="Id of the device.")],
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Deletes a device's contributions to a run. Example: fleetdistill devices forget digits camera-7 --yes

    The device takes part in the run no more, and nothing brings its contributions back. In a run with secure sums (not
    yet reviewed by a cryptographer), the whole sum that contains the device is deleted, with the other devices' parts
    of it.
    """
    with open_source(store, server, identity) as source:
        if not yes and any(row["device"] == device for row in source.devices(run).lists["devices"]):
            question = f"Delete for ever what device {device!r} has sent to run {run!r}, and exclude it from the run?"
            typer.confirm(question, abort=True)
        done = source.forget(run, device)
    later = (
        "are deleted before the run's next round; if no engine works on the run, by a server within seconds, or "
        "without a server if this command is repeated"
    )
    when = "are deleted" if done else later
    typer.echo(
        f"{device} no longer takes part in run {run!r}; its data in the method's state and its payloads {when}. "
        "Its id, figures and byte counts remain in the run's history, and so does its influence on values that the "
        "method averaged or trained over several devices. Of a run with secure sums (not yet reviewed by a "
        "cryptographer), the whole sum that contains the device is deleted (event batch-forgotten), and with it what "
        "the other devices gave. Backups are not changed"
    )
