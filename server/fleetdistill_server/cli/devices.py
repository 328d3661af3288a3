"""`fleetdistill devices`: who checked in, and who is to be forgotten or shut out."""

from __future__ import annotations

from typing import Annotated

import typer

from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    JsonOption,
    ServerOption,
    StoreOption,
    one_sentence,
    open_store,
    show,
)
from fleetdistill_server.cli.pki import warn_without_server
from fleetdistill_server.cli.remote import connect
from fleetdistill_server.security.revocation import revoke_device
from fleetdistill_server.service.serve_lock import served_run
from fleetdistill_server.views import runs as views

devices_app = typer.Typer(invoke_without_command=True)


@devices_app.callback()
@one_sentence
def devices(
    context: typer.Context,
    store: StoreOption = DEFAULT_STORE,
    run: Annotated[str | None, typer.Option(help="Only this run.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Lists the devices that checked in. Example: fleetdistill devices --run digits"""
    if context.invoked_subcommand is None:
        show(views.devices(open_store(store), run), as_json)


@devices_app.command("revoke")
@one_sentence
def devices_revoke(
    device: Annotated[str, typer.Argument(help="Its id.")],
    reason: Annotated[str, typer.Option(help="Why; it stands in the store.")] = "",
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
) -> None:
    """Shuts a device out, at its next call and for good. Example: fleetdistill devices revoke camera-7"""
    if server is not None:
        with connect(server, identity) as remote:
            changed = remote.revoke(device, reason)
    else:
        opened = open_store(store)
        warn_without_server(store)
        if not opened.credentials.knows_device(device):
            text = f"no device {device!r} has enrolled or called; it is shut out all the same, but is it the right one?"
            typer.echo(f"warning: {text}", err=True)
        changed = revoke_device(opened, device, reason)
    typer.echo(f"device {device!r} {'is revoked' if changed else 'was revoked before'}")


@devices_app.command("forget")
@one_sentence
def devices_forget(run: str, device: str, store: StoreOption = DEFAULT_STORE) -> None:
    """Deletes a device's part and payloads in a run. Example: fleetdistill devices forget digits camera-7"""
    from fleetdistill_server.engine.forgetting import ask_to_forget

    done = ask_to_forget(open_store(store), run, device, served=served_run(store))
    later = "are deleted before the run's next round; if the run is over, give this command again"
    when = "are deleted" if done else later
    typer.echo(
        f"{device} takes no part in run {run!r} any more; its part in the method's state and its payloads {when}. "
        "Its id, figures and byte counts stay in the run's history, and its share in what was averaged or learned of "
        "many devices, if the method does either; backups keep what they have"
    )
