"""`fleetdistill runs create`, `clone`, `start`, `pause`, `stop` and `cancel`, in a store or on a server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from fleetdistill.errors import ConfigurationError, LinkError, RefusedError, RunError
from fleetdistill.wire.codes import Code
from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    RunArgument,
    ServerOption,
    StoreOption,
    report_errors,
)
from fleetdistill_server.cli.pki import warn_of_other_run, warn_without_server
from fleetdistill_server.config.section import read_toml
from fleetdistill_server.operations.client import open_source
from fleetdistill_server.operations.source import Source, create_here
from fleetdistill_server.service.creation import NewRun
from fleetdistill_server.store.location import has_store
from fleetdistill_server.store.states import RunStatus

StartOption = Annotated[bool, typer.Option("--start", help="Start the run too.")]


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
    """Warns if no server works on a run that was started."""
    if not source.is_remote:
        warn_without_server(store, run)
        return
    with contextlib.suppress(LinkError):  # it was started anyway
        warn_of_other_run(str(source.about().facts.get("served_run") or ""), run)


@contextlib.contextmanager
def _naming(config: Path) -> Iterator[None]:
    """Names the file in an error about its content."""
    try:
        yield
    except (ConfigurationError, RunError, RefusedError) as error:
        if isinstance(error, RefusedError) and error.code != Code.BAD_MESSAGE:
            raise
        raise ConfigurationError(f"{config}: {error}") from error


COMMANDS: dict[str, Callable[..., None]] = {
    "create": runs_create,
    "clone": runs_clone,
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
    "cancel": _change_command(
        RunStatus.CANCELLED,
        """Cancels a run permanently, even while it is served. Example: fleetdistill runs cancel digits

        Devices keep their models and are notified that the run has ended. To start another run from its model, set
        [run] start_from.
        """,
    ),
}
"""The commands of this module, by name."""
