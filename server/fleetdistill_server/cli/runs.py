"""`fleetdistill runs`: what the runs of a store did, and commands that change one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    JsonOption,
    ServerOption,
    StoreOption,
    counted,
    one_sentence,
    open_store,
    seconds_of,
    show,
)
from fleetdistill_server.cli.remote import RemoteServer, connect
from fleetdistill_server.service.heartbeat import served
from fleetdistill_server.service.serve_lock import served_run
from fleetdistill_server.store.database import Row
from fleetdistill_server.views import runs as views
from fleetdistill_server.views.runs import View
from fleetdistill_server.views.units import readable_bytes

if TYPE_CHECKING:
    from fleetdistill_server.store.retention import Freed
from fleetdistill_server.store.run_names import no_such_run

YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
runs_app = typer.Typer(help="What the runs of a store did.", no_args_is_help=True)


class _LocalStore:
    """Reads the store in a directory as `RemoteServer` reads a server's."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._store = directory, open_store(directory)

    def runs(self) -> View:
        return views.runs(self._store, served(self._directory))

    def run(self, name: str) -> View:
        return views.run(self._store, name, served(self._directory))

    def follow(self, name: str) -> Iterator[list[Row]]:
        from fleetdistill_server.views.watch import follow

        return follow(self._store, name)


@contextlib.contextmanager
def reader(store: Path, server: str | None, identity: Path | None) -> Iterator[_LocalStore | RemoteServer]:
    """The runs of a server if one is named, else of the store in a directory."""
    if server is None:
        yield _LocalStore(store)
        return
    with connect(server, identity) as remote:
        yield remote


@runs_app.command("list")
@one_sentence
def runs_list(
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lists the runs of a store, or of a server. Example: fleetdistill runs list --json"""
    with reader(store, server, identity) as source:
        show(source.runs(), as_json)


@runs_app.command("show")
@one_sentence
def runs_show(
    run: str,
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows a run's rounds, figures and events. Example: fleetdistill runs show digits"""
    with reader(store, server, identity) as source:
        show(source.run(run), as_json)


@runs_app.command("prune")
@one_sentence
def runs_prune(
    run: str,
    store: StoreOption = DEFAULT_STORE,
    keep_rounds: Annotated[
        int | None, typer.Option(help="Closed rounds to keep, the newest first; by default [server] keep_rounds.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only rounds that ended so long ago: a number and d, h or m, such as 30d.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Deletes old rounds' payloads, events and figures. Example: fleetdistill runs prune digits --keep-rounds 1"""
    from fleetdistill_server.store.retention import prune

    pruned = prune(
        open_store(store),
        run,
        keep_rounds=keep_rounds,
        older_than_seconds=None if older_than is None else seconds_of("--older-than", older_than),
        dry_run=dry_run,
        served=served_run(store),
    )
    what = f"{counted(pruned.rounds, 'round')} with {counted(pruned.events, 'event')}, "
    what += f"{counted(pruned.figures, 'figure')}, {_payloads(pruned.freed)}"
    typer.echo(f"would free {what}" if dry_run else f"freed {what}")
    if pruned.later.payloads:
        typer.echo(f"{_payloads(pruned.later)} written within the hour: left to the server, which deletes them later")


@runs_app.command("rollback")
@one_sentence
def runs_rollback(
    run: str,
    to: Annotated[int, typer.Option("--to", help="The round whose end the run goes back to; 0: before the first.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Sets a run back to an earlier round's state. Example: fleetdistill runs rollback digits --to 12"""
    from fleetdistill_server.service import serve_lock
    from fleetdistill_server.store.rollback import roll_back

    opened = open_store(store)
    with serve_lock.take(store, run):  # no server may work on it meanwhile
        done = roll_back(opened, run, to)
    undone, completed = counted(done.undone, "round"), counted(done.completed_rounds, "completed round")
    typer.echo(f"run {run!r} is back after round {to}: {undone} undone, {completed} left; start it again to go on")


@runs_app.command("cancel")
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


@runs_app.command("delete")
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
    typer.echo(f"run {run!r} is deleted: {rows}, {_payloads(gone.freed)}")
    if gone.later.payloads:
        typer.echo(f"{_payloads(gone.later)} written within the hour: left to the server, which deletes them later")


@runs_app.command("watch")
@one_sentence
def runs_watch(
    run: str,
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Follows a run until it is over; Ctrl-C ends it. Example: fleetdistill runs watch digits"""
    from fleetdistill_server.views.watch import show_changes

    with reader(store, server, identity) as source:
        show_changes(source.follow(run), as_json=as_json, console=Console())


def _payloads(freed: Freed) -> str:
    return f"{counted(freed.payloads, 'payload')} ({readable_bytes(freed.bytes)})"
