"""An advisory lock on a file, released when the file is closed or the process ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any


def lock_file(path: Path) -> IO[Any] | None:
    """Locks a file; returns the open file, which holds the lock, or None if another process holds the lock.

    Raises:
        OSError: The file cannot be created.
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
