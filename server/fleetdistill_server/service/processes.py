"""What the server's processes share: exit statuses, not outliving the supervisor, and how memory is kept."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time

EXIT_CONFIGURATION = 2
EXIT_CANNOT_LISTEN = 3
EXIT_NO_SPACE = 4
_LOOK_SECONDS = 1.0

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 32 << 20


def end_with_parent(parent: int | None = None) -> None:
    """Ends this process, as SIGTERM would, once the process that started it is gone.

    Args:
        parent: Its id, by default that of the parent now; a child that takes long to start may have lost it already.
    """
    expected = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(_LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def child_environment() -> dict[str, str]:
    """The environment of a child, which finds the modules that this process finds, own models and methods too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def keep_freed_memory() -> None:
    """Makes the C library reuse the memory of one chunk for the next. Call it before any thread is started.

    By default glibc gives each megabyte back to the system and takes it again, page by page, which costs more than all
    our checks; and it keeps a heap for each thread, so that 16 threads hold 16 times what one stream needs. Elsewhere
    than on glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def open_files() -> int:
    """How many files this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def allow_open_files() -> None:
    """Every connection is an open file, and systems begin with few: takes as many as are allowed."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
