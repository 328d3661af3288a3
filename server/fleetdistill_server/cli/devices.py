"""`fleetdistill devices`: who checked in, and who is to be forgotten or shut out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    JsonOption,
    StoreOption,
    one_sentence,
    open_store,
    show,
)
from fleetdistill_server.cli.pki import devices_revoke
from fleetdistill_server.service.serve_lock import served_run
from fleetdistill_server.views import runs as views

if TYPE_CHECKING:
    pass

devices_app = typer.Typer(invoke_without_command=True)
devices_app.command("revoke")(devices_revoke)


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
