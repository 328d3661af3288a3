"""Erases a state directory, so that a crash at any time leaves either all of it, or an erasure that is completed.

erasing         exists while the directory is being erased; the next start completes the erasure
"""

from __future__ import annotations

from fleetdistill.state import failpoints
from fleetdistill.state.disk import disk_errors
from fleetdistill.state.durable import sync_directory
from fleetdistill.state.files import Files
from fleetdistill.state.own_files import own_files, own_folders
from fleetdistill.state.privacy_ledger import PRIVACY_LEDGER

ERASING = "erasing"
_KEPT = (PRIVACY_LEDGER, "lock", ERASING)


def erase(files: Files) -> None:
    """Deletes the SDK's files in a state directory, except for its lock and the privacy ledger; keeps other files.

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
        for path in own_files(files.directory):
            if path.name not in _KEPT:
                path.unlink(missing_ok=True)
        for folder in own_folders(files.directory):
            if not any(folder.iterdir()):
                folder.rmdir()
        sync_directory(files.directory)
        failpoints.hit("device.forget.after-files")
        (files.directory / ERASING).unlink()
        sync_directory(files.directory)
