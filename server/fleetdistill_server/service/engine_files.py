"""The directory of one run's engine within the store's: its configuration, heartbeat and resume point.

Everything in it is derived from the store's rows or can be lost, so it may be deleted while no engine runs.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.config.section import read_toml

__all__ = ["engine_directory"]

_ENGINES = "engines"
CONFIG_FILE = "run.toml"


def engine_directory(store: Path, run: str) -> Path:
    """Returns the directory of a run's engine; the prefix keeps the names `.` and `..` apart from directories."""
    return store / _ENGINES / f"run-{run}"


def engine_settings(store: Path, run: str) -> dict[str, Any] | None:
    """Returns the settings with which a run's newest engine started; None if that was on another machine."""
    with contextlib.suppress(ConfigurationError):
        return read_toml(engine_directory(store, run) / CONFIG_FILE)
    return None


def delete_engine_files(store: Path, run: str) -> None:
    """Deletes the directory of a run's engine, as far as possible."""
    shutil.rmtree(engine_directory(store, run), ignore_errors=True)
