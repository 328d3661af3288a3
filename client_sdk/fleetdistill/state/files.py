"""Files of a state directory, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from fleetdistill.state.disk import disk_errors
from fleetdistill.state.durable import rename_durably


class Files:
    """The files of one state directory.

    Attributes:
        directory: The state directory, which exists.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def load(self, name: str) -> bytes | None:
        """A file of the directory, or None."""
        path = self.directory / name
        with disk_errors(self.directory):
            return path.read_bytes() if path.exists() else None

    def remove(self, name: str) -> None:
        """Removes a file of the directory, if it is there."""
        with disk_errors(self.directory):
            (self.directory / name).unlink(missing_ok=True)

    def save(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """Writes a file of the directory whole or not at all.

        Args:
            name: Relative to the directory.
            data: Its bytes.
            mode: Permissions of the file.
        """
        path = self.directory / name
        temporary = path.with_name(path.name + ".new")
        with disk_errors(self.directory):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            rename_durably(temporary, path)
