"""An advisory lock on a file, released when the file is closed or the process ends."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import IO, Any

__all__ = ["lock_file"]

_fcntl: Any = None
_msvcrt: Any = None
try:
    import fcntl as _fcntl
except ImportError:  # Windows
    with contextlib.suppress(ImportError):  # neither POSIX nor Windows, such as WebAssembly
        import msvcrt as _msvcrt


def lock_file(path: Path) -> IO[Any] | None:
    """Locks a file; returns the open file, which holds the lock, or None if another process holds the lock.

    Without file locks in the operating system, returns the open file without a lock.

    Raises:
        OSError: The file cannot be created, or its file system cannot lock files.
    """
    file = path.open("a")
    try:
        _lock(file.fileno())
    except (BlockingIOError, PermissionError):  # Windows raises PermissionError for a locked file
        file.close()
        return None
    except OSError:
        file.close()
        raise
    return file


def _lock(descriptor: int) -> None:
    if _fcntl is not None:
        _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
    elif _msvcrt is not None:
        _msvcrt.locking(descriptor, _msvcrt.LK_NBLCK, 1)
