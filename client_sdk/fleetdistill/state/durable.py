"""Files that outlast a power cut: content first, then the name, then the directory; for server and SDK alike.

What fsync means differs: on macOS it leaves the data in the drive's cache, and only F_FULLFSYNC empties that.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO, Any

from fleetdistill.state import failpoints

try:
    import fcntl
except ImportError:  # Windows
    _FULL: int | None = None
else:
    _FULL = getattr(fcntl, "F_FULLFSYNC", None)


def sync_file(file: IO[Any]) -> None:
    """Returns once what was written to an open file is on the disk."""
    file.flush()
    failpoints.hit("disk.before-fsync")
    _sync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Returns once the names in a directory are on the disk."""
    if os.name == "nt":  # Windows has no fsync of directories
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path, mode: int = 0o700) -> None:
    """Makes a directory and those above it, each durable in the one above; one that is there is taken as it is.

    Only its user may look into it: a store holds labels, a state directory a model that was trained on private data.
    """
    if not directory.is_dir():
        make_directory(directory.parent, 0o777)
        directory.mkdir(mode, exist_ok=True)
        sync_directory(directory.parent)


def rename_durably(source: Path, target: Path) -> None:
    """Puts a written file in its place: after this a power cut leaves it whole, during it the whole old or new one."""
    with source.open("r+b") as file:
        sync_file(file)
    failpoints.hit("disk.before-rename")
    source.replace(target)
    failpoints.hit("disk.before-directory-fsync")
    sync_directory(target.parent)
    failpoints.hit("disk.after-directory-fsync")


def _sync(descriptor: int) -> None:
    if _FULL is not None:
        with contextlib.suppress(OSError):  # a file system that does not know it, such as a network's
            fcntl.fcntl(descriptor, _FULL)
            return
    os.fsync(descriptor)
