"""Errors and free space of the device's disk."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from fleetdistill.errors import NoRoomError, StateError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk."""


@contextlib.contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Converts OSError in the block into StateError, or into NoRoomError if the disk is full."""
    try:
        yield
    except OSError as error:
        kind = NoRoomError if error.errno in FULL else StateError
        raise kind(f"the state directory {directory} cannot be used: {error}") from error


def free_bytes(directory: Path) -> int:
    """Returns the free disk space at a directory that this process can use, in bytes."""
    with disk_errors(directory):
        return shutil.disk_usage(directory).free
