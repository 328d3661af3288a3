"""Durable files: fsync of the content, rename, then fsync of the directory. Used by SDK and server.

On macOS fsync leaves the data in the drive's cache; F_FULLFSYNC writes them to the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
from io import RawIOBase
from pathlib import Path
from typing import IO, Any

from fleetdistill.state import failpoints

try:
    import fcntl
except ImportError:  # Windows
    _FULL: int | None = None
else:
    _FULL = getattr(fcntl, "F_FULLFSYNC", None)

_UNSUPPORTED = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of an fsync that the file system does not support for directories; EIO and ENOSPC are not among them."""


def write_all(file: RawIOBase, data: bytes | memoryview) -> None:
    """Writes data to a file that was opened with `buffering=0`, whose `write` may write only a part.

    A buffered file would split every chunk of a stream into two writes.
    """
    left = memoryview(data)
    while left:
        left = left[file.write(left) or 0 :]


def sync_file(file: IO[Any]) -> None:
    """Flushes an open file; returns when its content is on the disk."""
    file.flush()
    failpoints.hit("disk.before-fsync")
    _sync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Returns when the names in a directory are on the disk, or immediately where a directory cannot be fsynced.

    Windows cannot open a directory, and some network file systems reject its fsync. There a power cut may revert the
    latest renames; a killed process still loses nothing.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except PermissionError:
        return
    try:
        _sync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def make_directory(directory: Path, mode: int = 0o700) -> None:
    """Creates a directory and its parents durably; does not change an existing one.

    By default only its owner can read it, because a store contains labels and a state directory contains a model
    trained on private data.
    """
    if not directory.is_dir():
        make_directory(directory.parent, 0o777)
        directory.mkdir(mode, exist_ok=True)
        sync_directory(directory.parent)


def keep_private(directory: Path) -> None:
    """Takes all access to a directory and everything in it from other users, for a store or a copy of one.

    It leaves out what belongs to another user, and file systems that know no modes.
    """
    for folder, _, names in os.walk(directory):
        for path in (Path(folder), *(Path(folder) / name for name in names)):
            with contextlib.suppress(PermissionError, FileNotFoundError):
                path.chmod(path.stat().st_mode & 0o700)


def open_to_others(directory: Path) -> str:
    """Returns that other users may use a directory, with the command that ends it; empty if they may not."""
    if os.name == "nt" or not directory.is_dir() or not directory.stat().st_mode & 0o077:
        return ""
    return f"other users can read the directory {directory}; run `chmod -R go= {directory}`"


def rename_durably(source: Path, target: Path) -> None:
    """Renames a written file durably. A power cut leaves the complete old or the complete new file."""
    with source.open("r+b") as file:
        sync_file(file)
    failpoints.hit("disk.before-rename")
    source.replace(target)
    failpoints.hit("disk.before-directory-fsync")
    sync_directory(target.parent)
    failpoints.hit("disk.after-directory-fsync")


def _sync(descriptor: int) -> None:
    if _FULL is not None:
        with contextlib.suppress(OSError):  # not supported by all file systems, such as network ones
            fcntl.fcntl(descriptor, _FULL)
            return
    os.fsync(descriptor)
