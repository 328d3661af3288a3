"""One process at a time: an advisory lock on a file, released when the file is closed or the process ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any


def lock_file(path: Path) -> IO[Any] | None:
    """Takes the lock and returns the open file to hold on to; None if another process has it.

    Raises:
        OSError: The file cannot be made.
    """
    file = path.open("a")
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
