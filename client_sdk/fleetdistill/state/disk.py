"""The device's disk: its errors in our words, and how much room it has."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from fleetdistill.errors import NoRoomError, StateError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Turns the operating system's errors into StateError; a full disk into NoRoomError."""
    try:
        yield
    except OSError as error:
        kind = NoRoomError if error.errno in _FULL else StateError
        raise kind(f"the state directory {directory} cannot be used: {error}") from error


def free_bytes(directory: Path) -> int:
    """Bytes that this process may still write there."""
    with disk_errors(directory):
        return shutil.disk_usage(directory).free
