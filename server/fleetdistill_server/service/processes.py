"""Functions shared by the server's processes: exit statuses, environments, parent exit, and file limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from fleetdistill.errors import ConfigurationError

__all__ = ["allow_open_files", "child_environment", "end_with_parent", "open_files"]

try:
    import resource
except ImportError:  # Windows, which has no limit on open files
    resource = None  # type: ignore[assignment]

EXIT_CONFIGURATION = 2
EXIT_CANNOT_LISTEN = 3
EXIT_NO_SPACE = 4
EXIT_STORE_AWAY = 5
EXIT_DAMAGED = 6
"""Of an engine that cannot read its run's state, such as a damaged checkpoint; another start does not help."""
_LOOK_SECONDS = 1.0
_UNLIMITED_FILES = 1 << 20

_KEPT_BYTES = str(32 << 20)
_KEEP_FREED_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": _KEPT_BYTES,
    "MALLOC_TRIM_THRESHOLD_": _KEPT_BYTES,
}
"""Environment of a front, so that glibc reuses the memory of one chunk for the next; other C libraries ignore it.

By default, glibc returns each megabyte to the system and requests it again, page by page, which costs more than
checking an upload. glibc also keeps a heap per thread, so 16 threads hold 16 times the memory that one stream needs.
"""


def check_system() -> None:
    """Raises ConfigurationError on Windows, where a front and an engine cannot share pipes."""
    if sys.platform == "win32":
        raise ConfigurationError(
            'the server\'s processes require Linux or macOS; on Windows run devices, or simulate with link = "memory"'
        )


def ending_in_words(what: str, code: int) -> str:
    """Describes the end of a process that recorded no reason.

    Args:
        what: The process, as in "the front".
        code: Its exit status, negative for a signal.
    """
    if code >= 0:
        return f"{what} exited with status {code}" + ("" if code else ", as after SIGTERM")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ": by hand, or by the kernel because memory was short" if -code == signal.SIGKILL else ""
    return f"{what} was killed by {name}{hint}"


def end_with_parent(parent: int | None = None) -> None:
    """Sends this process SIGTERM once its parent has exited.

    Args:
        parent: The parent's process id; None for the current parent. A slow child may already have lost its parent.
    """
    expected = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(_LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def end_with(pid: int) -> None:
    """Sends this process SIGTERM once the process with the given id has exited, which need not be its parent."""

    def watch() -> None:
        while _exists(pid):
            time.sleep(_LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def child_environment() -> dict[str, str]:
    """Returns the environment of a child, with this process's module paths, also for custom models."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def run_child(
    command: Sequence[str], text: str, seconds: float, ended: threading.Event
) -> subprocess.CompletedProcess[str]:
    """Runs a process of this package until it has exited, and kills it if it takes too long or is no longer wanted.

    Args:
        command: The command.
        text: Text for its standard input.
        seconds: Time limit.
        ended: Set by another thread once nobody waits for the result; the process is killed within a second.

    Returns:
        The exit status, negative for a signal, and what the process printed.

    Raises:
        TimeoutError: The time limit was reached, or the process was no longer wanted.
    """
    environment = child_environment()
    until = time.monotonic() + seconds
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        rest: str | None = text
        while True:
            try:
                printed, _ = process.communicate(rest, _LOOK_SECONDS)
                return subprocess.CompletedProcess(command, process.returncode, printed)
            except subprocess.TimeoutExpired:
                rest = None  # `communicate` goes on with what it was given first
            except BaseException:
                process.kill()
                raise
            if ended.is_set() or time.monotonic() > until:
                process.kill()
                raise TimeoutError


def front_environment() -> dict[str, str]:
    """Returns the environment of a front; variables that the operator has set take precedence."""
    return {**_KEEP_FREED_MEMORY, **child_environment()}


def limit_memory(size_bytes: int) -> None:
    """Lets this process write to at most so many bytes of memory; beyond them it gets MemoryError. Linux only."""
    if resource is not None and sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (size_bytes if hard < 0 else min(size_bytes, hard), hard))


def open_files() -> int:
    """Returns how many files this process may have open."""
    if resource is None:
        return _UNLIMITED_FILES
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else _UNLIMITED_FILES


def hard_limit_of_files() -> int:
    """Returns how many files a process of this user may have open after `allow_open_files`."""
    if resource is None:
        return _UNLIMITED_FILES
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return hard if hard != resource.RLIM_INFINITY else _UNLIMITED_FILES


def allow_open_files() -> None:
    """Raises this process's limit on open files to the hard limit, because every connection is an open file."""
    if resource is not None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
