"""A PostgreSQL server for tests, from the package `pgserver`: its own binaries, a data directory of its own, fsync on.

As root, pgserver runs the server as a user `pgserver`, which it creates; the data directory must be reachable for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

_IN_MEMORY = Path("/dev/shm")
_FORKS = 10
_numbers = itertools.count(1)


class Postgres:
    """A running server that listens on a socket in its data directory."""

    def __init__(self, server: Any) -> None:
        self._server = server

    @staticmethod
    def missing() -> str:
        """Why no server can be started here; empty if one can."""
        lacking = [name for name in ("pgserver", "psycopg") if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(lacking)}" if lacking else ""

    @classmethod
    @contextlib.contextmanager
    def start(cls) -> Iterator[Postgres]:
        """Runs a server until the end of the block."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # XDG_RUNTIME_DIR is not set in containers
            import pgserver
        parent = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None  # like pytest's own folders, see conftest
        folder = Path(tempfile.mkdtemp(prefix="fleetdistill-pg-", dir=parent))
        try:
            server = pgserver.get_server(folder / "data", cleanup_mode="stop")
            try:
                yield cls(server)
            finally:
                server.cleanup()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def schema(self) -> Iterator[str]:
        """Makes an empty schema and yields a URL that selects it."""
        name = f"test_{os.getpid()}_{next(_numbers)}"
        self.run(f"CREATE SCHEMA {name}")
        try:
            yield f"{self.url}&options={quote(f'-csearch_path={name}')}"
        finally:
            self.run(f"DROP SCHEMA {name} CASCADE")

    def restart(self, mode: str = "immediate") -> None:
        """Stops and starts the server; `immediate` is a crash: nothing is written before it ends."""
        self.stop(mode)
        self.start_again()

    def stop(self, mode: str = "immediate") -> None:
        """Stops the server."""
        self._control("-m", mode, "stop")

    def start_again(self) -> None:
        """Starts a stopped server on the same socket."""
        data = self._server.pgdata
        self._control("-o", "-h ''", "-o", f"-k {data}", "-l", str(data / "log"), "start")

    def _control(self, *words: str) -> None:
        from pgserver import pg_ctl

        for attempt in range(_FORKS):
            try:
                pg_ctl(["-w", *words], pgdata=self._server.pgdata, user=self._server.system_user, timeout=60)
            except subprocess.CalledProcessError as error:
                # A child forked while threads call gRPC can die in gRPC's fork handler, before it becomes pg_ctl.
                if error.returncode not in (-signal.SIGSEGV, -signal.SIGABRT) or attempt == _FORKS - 1:
                    raise
            else:
                return

    @property
    def url(self) -> str:
        """URL of the server's own database."""
        return str(self._server.get_uri())

    def end_sessions(self) -> None:
        """Ends all connections of the product; the server stays up."""
        self.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'fleetdistill'")

    def run(self, statement: str) -> None:
        """Runs a statement as the server's superuser."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement)
