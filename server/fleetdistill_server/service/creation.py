"""Creates runs in a process of its own, which builds their models first, as `serve` does.

Neither the front nor a command loads torch, a method or an operator's own modules for this.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fleetdistill.errors import RunError
from fleetdistill_server.service.processes import run_child
from fleetdistill_server.service.run_changes import RunState
from fleetdistill_server.store.operator_calls import Call

__all__ = ["NewRun"]

CREATION_SECONDS = 600.0
"""Time limit for creating a run; loading torch and a large model may take minutes."""
CREATION_BYTES = 16 << 30
"""Memory limit of the process that creates a run: four times the largest file that a run.toml may name."""


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """A run to be created, from settings or as a clone.

    Attributes:
        settings: Contents of its run.toml, unchecked; for a clone only the section `[run]` with its name.
        start: Whether to start the run too.
        clone_of: Name of the run whose settings it takes; empty for none.
        changes: Settings of the clone as `section.key=value`.
        data_directories: Directories that contain every data file that the settings may name, unless the run that it
            clones names it too; None for any file.
    """

    settings: Mapping[str, Any]
    start: bool = False
    clone_of: str = ""
    changes: Sequence[str] = field(default_factory=list)
    data_directories: Sequence[str] | None = None


def create_checked(
    directory: Path,
    run: NewRun,
    call: Call,
    ended: threading.Event | None = None,
    max_memory_bytes: int = CREATION_BYTES,
) -> RunState:
    """Checks a run as `serve --check` does, and creates it; returns the run.

    The operator's call is stored in the transaction that creates the run, and not at all if it cannot be created.

    Relative paths in its settings are relative to the current directory of this process.

    Args:
        directory: The store's directory.
        run: The run.
        call: The operator's call.
        ended: Set once nobody waits for the run any more, which ends its process.
        max_memory_bytes: Memory limit of its process; Linux only.

    Raises:
        RunError: The run cannot be created; nothing was stored.
    """
    command = [sys.executable, "-m", "fleetdistill_server.engine.creation", str(directory), str(os.getpid())]
    ended = ended or threading.Event()
    # a date in TOML is no valid setting anyway
    request = json.dumps({"run": asdict(run), "call": asdict(call), "memory": max_memory_bytes}, default=str)
    try:
        done = run_child(command, request, CREATION_SECONDS, ended)
    except TimeoutError as error:
        if ended.is_set():
            raise RunError("the call ended before the run was checked, so it was not created") from error
        raise RunError(f"checking the run took longer than {CREATION_SECONDS:g} s, so it was not created") from error
    text = done.stdout.strip()
    if done.returncode < 0:
        raise RunError(
            f"signal {-done.returncode} ended the process that checks the run; it may need more memory than there is"
        )
    if done.returncode:
        raise RunError(text or f"creating the run failed with exit status {done.returncode}; see the log")
    return RunState(**json.loads(text))
