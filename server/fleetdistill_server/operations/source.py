"""Where people read runs from: the store on this machine, or a server from elsewhere, with the same interface."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.operations.client import OperatorClient, connect
from fleetdistill_server.service.heartbeat import served
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.location import has_store
from fleetdistill_server.store.store import Store
from fleetdistill_server.views import runs as views
from fleetdistill_server.views.runs import View
from fleetdistill_server.views.watch import follow


def open_store(directory: Path) -> Store:
    """Opens the store in a directory. Raises ConfigurationError if there is none."""
    if not has_store(directory):
        raise ConfigurationError(
            f"there is no store in {directory}; set --store to the [server] store of your run.toml"
        )
    return Store.open(directory)


class LocalStore:
    """Reads runs from the store in a directory, with the same interface as `OperatorClient`."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._store = directory, open_store(directory)

    def runs(self) -> View:
        """Returns a view of all runs of the store."""
        return views.runs(self._store, served(self._directory))

    def run(self, name: str) -> View:
        """Returns a view of one run."""
        return views.run(self._store, name, served(self._directory))

    def follow(self, name: str) -> Iterator[list[Row]]:
        """Yields the changes in a run until it ends."""
        return follow(self._store, name)


@contextlib.contextmanager
def open_source(store: Path, server: str | None, identity: Path | None) -> Iterator[LocalStore | OperatorClient]:
    """Yields a source of runs: a server if one is given, else the store in a directory."""
    if server is None:
        yield LocalStore(store)
        return
    with connect(server, identity) as remote:
        yield remote
