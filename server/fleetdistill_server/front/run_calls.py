"""Creates, starts, pauses, resumes, stops, clones, rolls back and deletes runs for operators elsewhere.

Runs are created in a process of its own, and rolled back and deleted over a connection of its own, because none of this
is one short transaction of the front's commit thread.
"""

from __future__ import annotations

import contextlib
import threading
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fleetdistill.errors import ConfigurationError, DamagedError, RefusedError, RunError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import operations_pb2
from fleetdistill_server.service.creation import NewRun, create_checked
from fleetdistill_server.service.run_endings import delete, roll_back
from fleetdistill_server.store.operator_calls import Call
from fleetdistill_server.store.run_names import no_such_run
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import shortened
from fleetdistill_server.views.results import deleted


def led(change: Callable[[Store, str, str], str], run: str, who: str, store: Store) -> str:
    """Changes a run with a function of `service.run_changes`. Raises RefusedError if the change is not possible."""
    _check_known(store, run)
    with _refusals():
        return change(store, run, who)


class RemoteLeading:
    """Creates, rolls back and deletes runs of the store in a directory; every method returns a sentence on the run.

    The methods raise RefusedError if the change is not possible.

    Args:
        directory: The store's directory.
        data_directories: Directories of the data files that a new run may name.
    """

    def __init__(self, directory: Path, data_directories: Sequence[str]) -> None:
        self._directory = directory
        self._data = list(data_directories)

    def create(self, request: operations_pb2.CreateRunRequest, call: Call, ended: threading.Event) -> str:
        """Checks and creates a run, unless the call has ended."""
        with _refusals():
            run = NewRun(settings=_parsed(request.run_toml), start=request.start, data_directories=self._data)
            return create_checked(self._directory, run, call, ended)

    def clone(self, request: operations_pb2.CloneRunRequest, call: Call, ended: threading.Event) -> str:
        """Checks and creates a run with another run's settings, unless the call has ended."""
        settings = {"run": {"name": request.new_run}}
        with contextlib.closing(Store.open(self._directory)) as store:
            _check_known(store, request.run)
        with _refusals():
            run = NewRun(
                settings=settings,
                start=request.start,
                clone_of=request.run,
                changes=list(request.changes),
                data_directories=self._data,
            )
            return create_checked(self._directory, run, call, ended)

    def delete(self, run: str) -> str:
        """Deletes a run with everything that belongs to it."""
        with _refusals(), contextlib.closing(Store.open(self._directory)) as store:
            return deleted(run, delete(self._directory, store, run))

    def roll_back(self, run: str, to: int, who: str) -> str:
        """Rolls a run back to the state after a round; `who` is the operator."""
        with _refusals(), contextlib.closing(Store.open(self._directory)) as store:
            _check_known(store, run)
            return roll_back(self._directory, store, run, to, who)


def _check_known(store: Store, run: str) -> None:
    """Raises RefusedError if there is no such run."""
    if store.runs.get(run) is None:
        raise RefusedError(Code.UNKNOWN_RUN, shortened(no_such_run(run, store.runs.names())))


def _parsed(text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or a number of too many digits
        raise ConfigurationError(f"run.toml: {error}") from error


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (ConfigurationError, RunError, DamagedError) as error:
        raise RefusedError(Code.BAD_MESSAGE, shortened(str(error))) from error
