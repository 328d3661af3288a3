"""Files of a state directory, written atomically."""

from __future__ import annotations

import os
from pathlib import Path

from fleetdistill.state.disk import disk_errors
from fleetdistill.state.durable import rename_durably


class Files:
    """Reads and writes the files of one state directory.

    Attributes:
        directory: Path of the state directory, which must exist.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def load(self, name: str) -> bytes | None:
        """Returns the content of a file, or None if it does not exist."""
        path = self.directory / name
        with disk_errors(self.directory):
            return path.read_bytes() if path.exists() else None

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        with disk_errors(self.directory):
            (self.directory / name).unlink(missing_ok=True)

    def save(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """Writes a file atomically and durably.

        Args:
            name: Path relative to the directory.
            data: Content of the file.
            mode: Permissions of the file.
        """
        path = self.directory / name
        temporary = path.with_name(path.name + ".new")
        with disk_errors(self.directory):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            rename_durably(temporary, path)
