"""Creates, starts, pauses, resumes, stops, clones and deletes runs for operators elsewhere.

Each call has a connection of its own instead of the front's commit thread, so the change is durable when the function
returns, exactly as for a command on the server's machine.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from fleetdistill.errors import ConfigurationError, RefusedError, RunError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import operations_pb2
from fleetdistill_server.service.creation import NewRun, create_checked
from fleetdistill_server.service.run_endings import delete
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import shortened
from fleetdistill_server.views.deleted import deleted


class RemoteLeading:
    """Leads the runs of the store in a directory; every method returns a sentence on the run.

    The methods raise RefusedError if the change is not possible.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def create(self, request: operations_pb2.CreateRunRequest) -> str:
        """Checks and creates a run."""
        with _refusals():
            return create_checked(self._directory, NewRun(settings=_parsed(request.run_toml), start=request.start))

    def clone(self, request: operations_pb2.CloneRunRequest) -> str:
        """Checks and creates a run with another run's settings."""
        settings = {"run": {"name": request.new_run}}
        with _refusals():
            run = NewRun(settings=settings, start=request.start, clone_of=request.run, changes=list(request.changes))
            return create_checked(self._directory, run)

    def lead(self, change: Callable[[Store, str], str], run: str) -> str:
        """Changes a run with a function of `service.leading`."""
        with _refusals(), contextlib.closing(Store.open(self._directory)) as store:
            return change(store, run)

    def delete(self, run: str) -> str:
        """Deletes a run with everything that belongs to it."""
        with _refusals(), contextlib.closing(Store.open(self._directory)) as store:
            return deleted(run, delete(self._directory, store, run))


def _parsed(text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"run.toml: {error}") from error


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (ConfigurationError, RunError) as error:
        raise RefusedError(Code.BAD_MESSAGE, shortened(str(error))) from error
