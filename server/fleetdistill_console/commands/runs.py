"""`fleetdistill runs`: inspects, watches and changes the runs of a store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer
from rich.console import Console

from fleetdistill.errors import ConfigurationError, LinkError, RefusedError, RunError
from fleetdistill.printable import printable
from fleetdistill.wire.codes import Code
from fleetdistill_console.tables import show
from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    JsonOption,
    RunArgument,
    ServerOption,
    StoreOption,
    parse_duration,
    report_errors,
)
from fleetdistill_server.cli.pki import warn_of_other_run, warn_without_server
from fleetdistill_server.config.section import read_toml
from fleetdistill_server.config.server_config import OF_A_RUN
from fleetdistill_server.intake.operator_log import local_call, local_log
from fleetdistill_server.operations.client import open_source
from fleetdistill_server.operations.source import Source, create_here, open_store
from fleetdistill_server.service.creation import NewRun
from fleetdistill_server.service.serve_lock import serving
from fleetdistill_server.store.location import SQLITE, has_store
from fleetdistill_server.store.operator_calls import Outcome
from fleetdistill_server.store.states import QUEUED, RunStatus
from fleetdistill_server.texts import SUMS_UNREVIEWED, counted, readable_bytes
from fleetdistill_server.views.results import deleted, left_for_later, pruned, rolled_back
from fleetdistill_server.views.runs import TableRow, View

StartOption = Annotated[bool, typer.Option("--start", help="Start the run too.")]
_MAX_ROUNDS = 20
"""Number of rounds that `runs show` prints; the newest ones."""
_NOT_SHOWN_OF_SUMS = ("keys", "boxes", "signatures", "shares", "sid", "roster")
"""Columns of secure sums that only `--json` has, and the first four the dashboard."""
_LARGE_LOG = 1 << 20
"""Size in bytes from which `runs prune --dry-run` names the log of the database."""
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
runs_app = typer.Typer(help="Inspects and manages runs.", no_args_is_help=True)


@runs_app.command("create")
@report_errors
def runs_create(
    config: Annotated[Path, typer.Argument(help="Path of run.toml.")],
    store: Annotated[
        Path | None, typer.Option("--store", help="Directory of the store; default: [server] store of the file.")
    ] = None,
    server: ServerOption = None,
    identity: IdentityOption = None,
    start: StartOption = False,
) -> None:
    """Checks a run and stores it for `fleetdistill serve server.toml`. Example: fleetdistill runs create run.toml

    Models, modules and data that the file names must be on the server's machine. A run that exists already takes the
    settings that may change between starts; its engine reads them when it starts the next time.
    """
    settings = read_toml(config)
    if "run" not in settings:
        raise ConfigurationError(f"{config} has no section [run], so it is the file of a server; give that of a run")
    run = NewRun(settings=settings, start=start)
    _warn_of_server_settings(settings)
    name = str(settings["run"].get("name", "")) if isinstance(settings["run"], dict) else ""
    if server is None:
        own = settings.get("server", {})
        directory = store or Path(str(own.get("store", DEFAULT_STORE) if isinstance(own, dict) else DEFAULT_STORE))
        place = "" if has_store(directory) else f" in the new store {directory}"
        with _naming(config):
            state = create_here(directory, run)
        typer.echo(state.sentence + place)
        if start:
            warn_without_server(directory, name)
        return
    with open_source(DEFAULT_STORE, server, identity) as source:
        with _naming(config):
            state = source.create(run)
        typer.echo(state.sentence)
        if start:
            _warn(source, DEFAULT_STORE, name)


def _warn_of_server_settings(settings: Mapping[str, Any]) -> None:
    """Warns of settings in a run.toml that belong to the server, which `serve run.toml` would use."""
    section = settings.get("server", {})
    names = [name for name in section if name not in (*OF_A_RUN, "store")] if isinstance(section, Mapping) else []
    unused = [f"[server] {', '.join(names)}"] * bool(names) + ["[limits]"] * bool(settings.get("limits"))
    if unused:
        text = f"warning: {' and '.join(unused)} of the file have no effect on a run of a server of many runs"
        typer.echo(f"{text}; they belong in its server.toml", err=True)


@runs_app.command("clone")
@report_errors
def runs_clone(
    run: RunArgument,
    new: Annotated[str, typer.Argument(help="Name of the new run.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of the new run as section.key=value; repeatable.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    start: StartOption = False,
) -> None:
    """Creates a run with another run's settings. Example: fleetdistill runs clone digits digits-2 --set run.seed=7

    The new run begins with a new model; to begin with the other run's, add --set run.start_from=RUN. An existing run
    is not changed: if its settings are others, this is an error that names them.
    """
    with open_source(store, server, identity) as source:
        wanted = NewRun(settings={"run": {"name": new}}, start=start, clone_of=run, changes=changes or [])
        typer.echo(source.create(wanted).sentence)
        if start:
            _warn(source, store, new)


def _change_command(status: RunStatus, description: str) -> Callable[..., None]:
    """Returns the command that gives a run a status."""

    @report_errors
    def command(
        run: RunArgument,
        store: StoreOption = DEFAULT_STORE,
        server: ServerOption = None,
        identity: IdentityOption = None,
    ) -> None:
        with open_source(store, server, identity) as source:
            typer.echo(source.change(run, status).sentence)
            if status is RunStatus.RUNNING:
                _warn(source, store, run)

    command.__doc__ = description
    return command


def _warn(source: Source, store: Path, run: str) -> None:
    """Warns if no server works on a run that was started, and says so if it has to wait for an engine."""
    with contextlib.suppress(LinkError):  # it was started anyway
        if source.is_remote:
            warn_of_other_run(str(source.about().facts.get("served_run") or ""), run)
        else:
            warn_without_server(store, run)
        status = str(source.run(run).facts["status"])
        if status.startswith(QUEUED):
            count = source.server().facts["engines_at_once"]
            typer.echo(f"it is {status}: all engines are at work ({count}, by [server] engines_at_once)")


@contextlib.contextmanager
def _naming(config: Path) -> Iterator[None]:
    """Names the file in an error about its content."""
    try:
        yield
    except (ConfigurationError, RunError, RefusedError) as error:
        if isinstance(error, RefusedError) and error.code != Code.BAD_MESSAGE:
            raise
        raise ConfigurationError(f"{config}: {error}") from error


_CHANGES = {
    "start": _change_command(
        RunStatus.RUNNING,
        """Starts a run that was created, paused or stopped, or failed. Example: fleetdistill runs start digits

        A paused run continues its open round.
        """,
    ),
    "pause": _change_command(
        RunStatus.PAUSED,
        """Pauses a run, in the middle of a round if one is open. Example: fleetdistill runs pause digits

        Its engine ends. Devices finish and send the work that they have begun, then wait.
        """,
    ),
    "stop": _change_command(
        RunStatus.STOPPED,
        """Stops a run; closes its open round as short. Example: fleetdistill runs stop digits

        `fleetdistill runs start` starts it again.
        """,
    ),
}
for _name, _command in _CHANGES.items():
    runs_app.command(_name)(_command)


@runs_app.command("cancel")
@report_errors
def runs_cancel(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    yes: YesOption = False,
) -> None:
    """Cancels a run permanently, even while it is served. Example: fleetdistill runs cancel digits --yes

    A run that is stopped or paused can be started again, a cancelled one cannot. Devices keep their models and are
    notified that the run has ended. To start another run from its model, set [run] start_from.
    """
    with open_source(store, server, identity) as source:
        if not yes:
            _ask(_row_of(source, run), f"Cancel run {run!r}? It cannot be started again; a stopped or paused run can")
        typer.echo(source.change(run, RunStatus.CANCELLED).sentence)


@runs_app.command("list")
@report_errors
def runs_list(
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lists the runs of a store or a server. Example: fleetdistill runs list --json"""
    with open_source(store, server, identity) as source:
        show(source.runs(), as_json)
        for warning in source.warnings():
            typer.echo(f"warning: {printable(warning)}", err=True)


@runs_app.command("show")
@report_errors
def runs_show(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows a run's last rounds, figures and events; --json has all rounds. Example: fleetdistill runs show digits"""
    with open_source(store, server, identity) as source:
        view = source.run(run)
    if not as_json:
        _shorten(view)
    show(view, as_json)


@runs_app.command("settings")
@report_errors
def runs_settings(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
) -> None:
    """Prints a run's settings as a run.toml. Example: fleetdistill runs settings digits > digits.toml"""
    with open_source(store, server, identity) as source:
        view = source.settings(run)
    if waiting := view.facts["not_in_use"]:
        typer.echo(f"# The engine reads these when it starts again: {waiting}")
    typer.echo(tomli_w.dumps(_without_none(view.facts["settings"])), nl=False)


def _without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings without those that have no value, which TOML cannot express."""
    return {
        name: _without_none(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if value is not None
    }


def _shorten(view: View) -> None:
    """Leaves the newest rounds, and the columns of secure sums that fit on a terminal."""
    rounds = view.lists["rounds"]
    if len(rounds) > _MAX_ROUNDS:
        view.lists["rounds"] = rounds[-_MAX_ROUNDS:]
        view.facts["rounds_shown"] = f"the last {_MAX_ROUNDS} of {len(rounds)}; --json prints all"
    if "secure_sums" in view.lists:
        view.facts["note"] = SUMS_UNREVIEWED
        first = view.lists["rounds"][0]["round"]
        view.lists["secure_sums"] = [
            {name: value for name, value in row.items() if name not in _NOT_SHOWN_OF_SUMS}
            for row in view.lists["secure_sums"]
            if row["round"] >= first
        ]


@runs_app.command("prune")
@report_errors
def runs_prune(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    keep_rounds: Annotated[
        int | None, typer.Option(help="Number of newest closed rounds to keep; default: [server] keep_rounds.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Prune only rounds that ended at least this long ago, such as 30d, 12h or 45m.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")] = False,
    yes: YesOption = False,
    server: Annotated[str | None, typer.Option("--server", hidden=True)] = None,
    identity: Annotated[Path | None, typer.Option("--identity", hidden=True)] = None,
) -> None:
    """Deletes old rounds' payloads, events and figures. Example: fleetdistill runs prune digits --keep-rounds 1"""
    from fleetdistill_server.store.retention import Pruned, prune

    if server is not None or identity is not None:
        raise ConfigurationError(
            "`runs prune` cannot be combined with --server; run it on the server's machine, in the directory that "
            "contains the store, also while the server runs. From here, `runs delete` deletes a whole run"
        )
    opened = open_store(store)
    work = partial(
        prune,
        opened,
        run,
        keep_rounds=keep_rounds,
        older_than_seconds=None if older_than is None else parse_duration("--older-than", older_than),
        served=serving(store) is not None,
    )
    result = work(dry_run=True) if dry_run or not yes else Pruned()
    if not dry_run:
        if result != Pruned():
            typer.confirm(f"Delete {pruned(result)} of run {run!r}?", abort=True)
        wanted = {"run": run, "keep_rounds": keep_rounds, "older_than": older_than}
        result = local_log(opened).around(
            local_call("PruneRun", wanted), work, lambda done: Outcome(text=f"freed {pruned(done)}")
        )
    typer.echo(f"would free {pruned(result)}" if dry_run else f"freed {pruned(result)}")
    if later := left_for_later(result.later):
        typer.echo(later)
    log = store / f"{SQLITE}-wal"
    if dry_run and log.exists() and log.stat().st_size > _LARGE_LOG:
        size = readable_bytes(log.stat().st_size)
        typer.echo(f"the database's log ({size}) is written into the database and cut off")


@runs_app.command("rollback")
@report_errors
def runs_rollback(
    run: RunArgument,
    to: Annotated[
        int,
        typer.Option(
            "--to", help="Number of the round in `runs show`, where short rounds count too; 0: before round 1."
        ),
    ],
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
) -> None:
    """Rolls a run back to the state after a round. Example: fleetdistill runs rollback digits --to 12

    Stop the run first. A server may work on other runs meanwhile.
    """
    with open_source(store, server, identity) as source:
        typer.echo(rolled_back(run, to, source.roll_back(run, to)))


@runs_app.command("delete")
@report_errors
def runs_delete(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    yes: YesOption = False,
) -> None:
    """Deletes a run and its model, whatever its status. Example: fleetdistill runs delete digits --yes

    It can be repeated, and then deletes what an interrupted deletion has left. The exit status is 1 for a name that no
    run had.
    """
    with open_source(store, server, identity) as source:
        if not yes:
            _ask(_row_of(source, run), f"Delete run {run!r} with its model, receipts and figures?")
        typer.echo(deleted(run, source.delete(run)))


def _row_of(source: Source, run: str) -> TableRow | None:
    return next((item for item in source.runs().lists["runs"] if item["run"] == run), None)


def _ask(row: TableRow | None, question: str) -> None:
    """Asks for confirmation before a run ends; an unknown run is the error of the command itself."""
    if row is not None:
        what = f"It is {row['status']} and has {counted(row['completed_rounds'], 'completed round')}."
        typer.confirm(f"{what} {question}", abort=True)


@runs_app.command("watch")
@report_errors
def runs_watch(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Follows a run until it ends; Ctrl-C stops following. Example: fleetdistill runs watch digits"""
    from fleetdistill_console.watch import show_changes

    with open_source(store, server, identity) as source:
        show_changes(source.follow(run), as_json=as_json, console=Console())
