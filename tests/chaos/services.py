"""What a server beyond one machine needs: PostgreSQL, which can crash in mid-run, and an object store."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from chaos.members import Place
from support.object_store import ObjectStore
from support.postgres import Postgres

from fleetdistill_server.store.location import Location


class Services:
    """The services of one run.

    Args:
        postgres: A server that only this run uses.
        database: URL of an empty schema in it.
        objects: The object store.

    Attributes:
        restarts: How often PostgreSQL was restarted.
    """

    def __init__(self, postgres: Postgres, database: str, objects: ObjectStore) -> None:
        self._postgres, self._database, self._objects = postgres, database, objects
        self._restarting: threading.Thread | None = None
        self.restarts = 0
        os.environ.update(objects.environment)  # the harness reads the store too

    def place(self, work: Path) -> Place:
        """The folder of a run whose store is in these services."""
        location = Location(self._database, self._objects.prefix())
        return Place(work, location=location, environment=tuple(self._objects.environment.items()))

    def restart(self) -> bool:
        """Begins a crash and a start of PostgreSQL; False while the one before is under way."""
        if self._restarting is not None and self._restarting.is_alive():
            return False
        self.restarts += 1
        self._restarting = threading.Thread(target=self._postgres.restart)
        self._restarting.start()
        return True

    def wait(self) -> None:
        """Waits until PostgreSQL runs again."""
        if self._restarting is not None:
            self._restarting.join()
