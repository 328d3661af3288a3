"""Creates, changes, rolls back and deletes runs for operators elsewhere. The functions raise RefusedError.

Runs are created in a process of its own, and rolled back and deleted over a connection of its own, because none of this
is one short transaction of the front's commit thread.
"""

from __future__ import annotations

import contextlib
import threading
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from fleetdistill.errors import ConfigurationError, DamagedError, RefusedError, RunError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import operations_pb2
from fleetdistill_server.service import run_changes, run_endings
from fleetdistill_server.service.creation import NewRun, create_checked
from fleetdistill_server.service.run_changes import RunState
from fleetdistill_server.store.operator_calls import Call
from fleetdistill_server.store.retention import Pruned
from fleetdistill_server.store.rollback import RolledBack
from fleetdistill_server.store.run_names import no_such_run
from fleetdistill_server.store.states import OVER, RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import shorten


def create(
    directory: Path,
    data_directories: Sequence[str],
    request: operations_pb2.CreateRunRequest,
    call: Call,
    ended: threading.Event,
) -> RunState:
    """Checks and creates a run, unless the call has ended; its data files must be in the given directories."""
    if request.clone_of:
        with contextlib.closing(Store.open(directory)) as store:
            _check_known(store, request.clone_of)
    with _refusals():
        run = NewRun(
            settings=_parse(request.run_toml),
            start=request.start,
            clone_of=request.clone_of,
            changes=list(request.changes),
            data_directories=list(data_directories),
        )
        return create_checked(directory, run, call, ended)


def change(store: Store, request: operations_pb2.ChangeRunRequest, who: str) -> RunState:
    """Starts, pauses, stops or cancels a run; not the last while devices of a run in progress are to be forgotten."""
    run = request.run
    _check_known(store, run)
    if request.status == RunStatus.CANCELLED and store.runs.status(run) not in OVER and store.devices.to_forget(run):
        text = f"run {run!r} still has devices to forget; try again after the run's next round"
        raise RefusedError(Code.NOT_READY, f"{text}, or cancel it on the server's machine with --store")
    with _refusals():
        return run_changes.change(store, run, request.status, who)


def delete(directory: Path, run: str) -> Pruned | None:
    """Deletes a run with everything that belongs to it; returns None if there was none of this name."""
    with _refusals(), contextlib.closing(Store.open(directory)) as store:
        return run_endings.delete(directory, store, run)


def roll_back(directory: Path, run: str, to: int, who: str) -> RolledBack:
    """Rolls a run back to the state after a round; `who` is the operator."""
    with _refusals(), contextlib.closing(Store.open(directory)) as store:
        _check_known(store, run)
        return run_endings.roll_back(directory, store, run, to, who)


def _check_known(store: Store, run: str) -> None:
    """Raises RefusedError if there is no such run."""
    if store.runs.get(run) is None:
        raise RefusedError(Code.UNKNOWN_RUN, shorten(no_such_run(run, store.runs.names())))


def _parse(text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or a number of too many digits
        raise ConfigurationError(f"run.toml: {error}") from error


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (ConfigurationError, RunError, DamagedError) as error:
        raise RefusedError(Code.BAD_MESSAGE, shorten(str(error))) from error
