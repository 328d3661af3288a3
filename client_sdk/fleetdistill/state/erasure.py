"""Erases a state directory, so that a crash at any time leaves either all of it, or an erasure that is completed.

erasing         exists while the directory is being erased; the next start completes the erasure
"""

from __future__ import annotations

import shutil
from pathlib import Path

from fleetdistill.state import failpoints
from fleetdistill.state.disk import disk_errors
from fleetdistill.state.durable import sync_directory
from fleetdistill.state.files import Files
from fleetdistill.state.privacy_ledger import PRIVACY_LEDGER

ERASING = "erasing"
_KEPT = (PRIVACY_LEDGER, "lock", ERASING)


def erase(files: Files) -> None:
    """Deletes everything in a state directory but its lock and the privacy ledger.

    A private release was sent and stays spent: without the ledger, a new device with the same rows could make another.

    Raises:
        StateError: A file cannot be deleted. Opening the directory tries again.
    """
    files.save(ERASING, b"")
    failpoints.hit("device.forget.after-mark")
    complete_erasure(files)


def complete_erasure(files: Files) -> None:
    """Completes an erasure that has begun; does nothing in any other directory."""
    if not (files.directory / ERASING).exists():
        return
    with disk_errors(files.directory):
        for path in sorted(files.directory.iterdir()):
            if path.name not in _KEPT:
                _delete(path)
        sync_directory(files.directory)
        failpoints.hit("device.forget.after-files")
        (files.directory / ERASING).unlink()
        sync_directory(files.directory)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
