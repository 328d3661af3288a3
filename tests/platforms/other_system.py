"""Makes a process behave like one on another operating system: names of POSIX are gone, files have Windows' rules.

`forget_product` comes first, so that the product's modules are imported again on the other system. Third-party packages
stay as they are: their wheels for the other system exist (`make wheels`). Imports nothing of the product itself.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import importlib.abc
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog")
"""Modules that Windows does not have."""
OS_NAMES = (
    *("fork", "forkpty", "register_at_fork", "mkfifo", "mknod", "statvfs", "fstatvfs", "setsid", "killpg", "uname"),
    *("nice", "getpriority", "setpriority", "sched_yield", "sched_setaffinity", "sched_getaffinity", "getloadavg"),
    *("getuid", "geteuid", "getgid", "getegid", "chown", "fchmod", "fchown", "lchown", "sysconf", "confstr", "sync"),
    *("pread", "pwrite", "preadv", "pwritev", "sendfile", "posix_fadvise", "posix_fallocate", "posix_spawn", "lockf"),
    *("memfd_create", "eventfd", "pidfd_open", "wait", "wait3", "wait4", "waitid", "WNOHANG", "fdatasync"),
    *("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "O_SYNC", "O_DSYNC", "O_NOCTTY", "O_PATH", "O_TMPFILE"),
)
"""Names of `os` that Windows does not have."""
SIGNAL_NAMES = (
    *("SIGKILL", "SIGCHLD", "SIGSTOP", "SIGCONT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPIPE"),
    *("pthread_sigmask", "sigwait", "sigwaitinfo", "sigpending", "pthread_kill", "alarm", "setitimer", "siginterrupt"),
)
"""Names of `signal` that Windows does not have."""


def forget_product() -> None:
    """Removes the product and a helper that imports it; the generated protocol stays registered."""
    for name in list(sys.modules):
        if re.match(r"(fleetdistill(_\w+)?|support\.open_device)(\.|$)", name) and ".wire.v1" not in name:
            del sys.modules[name]


class _Missing(importlib.abc.MetaPathFinder):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname in self._names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def without_modules(*names: str) -> None:
    """Makes importing these modules fail."""
    sys.meta_path.insert(0, _Missing(names))
    for name in names:
        sys.modules.pop(name, None)


def without_posix() -> None:
    """Removes what Windows does not have from the standard library, as far as the product could use it."""
    import multiprocessing.util  # noqa: F401  (what the standard library uses itself is bound before it goes)
    import tempfile  # noqa: F401

    without_modules(*MODULES)
    shutil.disk_usage = _disk_usage(os.statvfs)  # type: ignore[assignment]
    _remove(os, OS_NAMES)
    _remove(signal, SIGNAL_NAMES)
    for name in ("add_signal_handler", "add_reader"):
        setattr(asyncio.BaseEventLoop, name, _not_implemented)
        setattr(asyncio.SelectorEventLoop, name, _not_implemented)
    shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]
    popen = subprocess.Popen.__init__

    def start(self: Any, *args: Any, pass_fds: Sequence[int] = (), **given: Any) -> None:
        if pass_fds:
            raise ValueError("pass_fds not supported on Windows.")
        popen(self, *args, **given)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign, assignment]


def _disk_usage(statvfs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`shutil.disk_usage`, which asks Windows in another way, without `os.statvfs`."""

    def usage(path: Any) -> Any:
        result = statvfs(path)
        total, free = result.f_blocks * result.f_frsize, result.f_bavail * result.f_frsize
        return shutil._ntuple_diskusage(total, total - free, free)

    return usage


def _remove(module: ModuleType, names: Sequence[str]) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _not_implemented(*args: Any, **given: Any) -> None:
    raise NotImplementedError


def windows_files(patch: pytest.MonkeyPatch) -> None:
    """Gives files Windows' rules.

    A file that is open or mapped can be neither deleted nor replaced nor renamed; a directory cannot be opened; text
    is written with two characters at the end of a line.
    """
    for name in ("unlink", "remove", "rename", "replace"):
        patch.setattr(os, name, _unless_open(getattr(os, name)))
    patch.setattr(shutil, "_use_fd_functions", False)
    patch.setattr(os, "open", _no_directory(os.open))
    opened = _text_mode(io.open)
    patch.setattr(io, "open", opened)
    patch.setattr(builtins, "open", opened)


def windows() -> None:
    """Makes this process behave like one on Windows, with its locks, until it ends."""
    without_posix()
    sys.modules["msvcrt"] = _msvcrt()
    windows_files(pytest.MonkeyPatch())


def _unless_open(call: Callable[..., None]) -> Callable[..., None]:
    def checked(*paths: Any, **given: Any) -> None:
        used = in_use()
        for path in paths:
            if os.path.realpath(path) in used:
                raise PermissionError(errno.EACCES, "The process cannot access the file", str(path))
        call(*paths, **given)

    return checked


def in_use() -> set[str]:
    """Returns the paths of all files that this process has open or mapped. Linux only, through /proc."""
    result = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            result.add(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the directory itself, closed again
            continue
    with io.open("/proc/self/maps") as file:  # noqa: UP020  (builtins.open is replaced)
        return result | {line.split(maxsplit=5)[5].rstrip("\n") for line in file if line.count("/")}


def _no_directory(call: Callable[..., int]) -> Callable[..., int]:
    def opened(path: Any, *args: Any, **given: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return call(path, *args, **given)

    return opened


def _text_mode(call: Callable[..., Any]) -> Callable[..., Any]:
    """Text files without an encoding have Windows' usual one; written lines end with two characters."""

    def opened(
        file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, errors: str | None = None,
        newline: str | None = None, *others: Any, **given: Any,
    ) -> Any:  # fmt: skip
        if "b" not in mode:
            encoding = "cp1252" if encoding in (None, "locale") else encoding
            newline = "\r\n" if newline is None and set(mode) & set("wax+") else newline
        return call(file, mode, buffering, encoding, errors, newline, *others, **given)

    return opened


def _msvcrt() -> ModuleType:
    """A module with `locking`, which locks a file in this process."""
    locked: dict[tuple[int, int], int] = {}
    module: Any = ModuleType("msvcrt")
    module.LK_NBLCK = 2

    def locking(descriptor: int, mode: int, count: int) -> None:
        assert (mode, count) == (module.LK_NBLCK, 1)
        result = os.fstat(descriptor)
        key = (result.st_dev, result.st_ino)
        holder = locked.get(key, descriptor)
        if holder != descriptor and _is_same(holder, key):
            raise PermissionError(errno.EACCES, "Permission denied")
        locked[key] = descriptor

    module.locking = locking
    return module


def _is_same(descriptor: int, key: tuple[int, int]) -> bool:
    """Whether a descriptor is still open on a file; closing it released the lock."""
    try:
        result = os.fstat(descriptor)
    except OSError:
        return False
    return (result.st_dev, result.st_ino) == key
