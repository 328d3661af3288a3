"""Forgets devices of runs that no engine works on: a process of its own does it, because it loads torch."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from fleetdistill_server.service.processes import child_environment
from fleetdistill_server.store.store import Store

logger = logging.getLogger("fleetdistill.server.supervisor")
_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 60.0
"""Pause after a process that failed, for example because a backup is in progress."""


class Forgetting:
    """Starts a process whenever a run that is over, or stopped, has devices to forget; one at a time.

    Args:
        store: The supervisor's store.
        directory: The store's directory.
        run: The only run of the server; empty for all.
    """

    def __init__(self, store: Store, directory: Path, run: str) -> None:
        self._store, self._directory, self._run = store, directory, run
        self._process: subprocess.Popen[bytes] | None = None
        self._next_look = 0.0

    def look(self) -> None:
        """Starts a process if one is needed; does not wait for it."""
        if self._process is not None and (status := self._process.poll()) is not None:
            self._process = None
            if status:
                logger.error("forgetting devices failed with exit status %d; trying again later", status)
                self._next_look = time.monotonic() + _RETRY_SECONDS
        if self._process is not None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        runs = [run for run in self._store.devices.runs_to_forget_in() if self._run in ("", run)]
        if runs:
            module = "fleetdistill_server.engine.forgetting"
            command = [sys.executable, "-m", module, str(self._directory), str(os.getpid()), *runs]
            self._process = subprocess.Popen(command, env=child_environment())

    def stop(self) -> None:
        """Ends the process; the next server starts it again."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
