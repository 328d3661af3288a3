"""The directory of one run's engine within the store's: its configuration, heartbeat and resume point.

Everything in it is derived from the store's rows or can be lost, so it may be deleted while no engine runs.
"""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["engine_directory"]

_ENGINES = "engines"


def engine_directory(store: Path, run: str) -> Path:
    """Returns the directory of a run's engine; the prefix keeps the names `.` and `..` apart from directories."""
    return store / _ENGINES / f"run-{run}"


def delete_engine_files(store: Path, run: str) -> None:
    """Deletes the directory of a run's engine, as far as possible."""
    shutil.rmtree(engine_directory(store, run), ignore_errors=True)
