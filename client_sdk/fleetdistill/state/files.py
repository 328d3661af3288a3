"""Files of a state directory, written atomically."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from fleetdistill.errors import DamagedStateError, NoRoomError
from fleetdistill.state.disk import disk_errors
from fleetdistill.state.durable import rename_durably, sync_directory, sync_file

__all__ = ["Files"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SetAside:
    """A damaged file that was put aside; the device continues without it.

    Attributes:
        path: Path of the file.
        kept_as: Path of its renamed copy.
        text: What was found and what the device does, as a sentence.
    """

    path: Path
    kept_as: Path
    text: str


class Files:
    """Reads and writes the files of one state directory.

    Attributes:
        directory: Path of the state directory, which must exist.
        put_aside: Damaged files that were put aside and not reported to the app yet.
    """

    has_directory = True
    """Whether the state is in files; a simulated device's is in memory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.put_aside: list[SetAside] = []

    def load(self, name: str) -> bytes | None:
        """Returns the content of a file, or None if it does not exist."""
        path = self.directory / name
        with disk_errors(self.directory):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another thread may delete it just now
                return path.read_bytes()
            return None

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        with disk_errors(self.directory):
            (self.directory / name).unlink(missing_ok=True)

    def wipe(self, name: str) -> None:
        """Overwrites a file with zeros and removes it, if it exists.

        A file system that copies on write, or flash memory, may keep the old content elsewhere.
        """
        path = self.directory / name
        with disk_errors(self.directory):
            if not path.exists():
                return
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))
                sync_file(file)
            path.unlink()
            sync_directory(path.parent)

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

    def note(self, name: str, data: bytes) -> None:
        """Writes a file without fsync; does nothing on a full disk. For facts that the device can find out again."""
        with contextlib.suppress(NoRoomError), disk_errors(self.directory):
            (self.directory / name).write_bytes(data)

    def set_aside(self, name: str, reason: object, effect: str, *, copy: bool = False) -> None:
        """Renames a damaged file to `NAME.damaged-1`, or the next free number, and notes it for the app.

        Args:
            name: Path relative to the directory, of a file or a folder.
            reason: What is wrong with the file, as a text or an exception.
            effect: What the device does without it.
            copy: Whether to copy the file, because the caller replaces it atomically.
        """
        path = self.directory / name
        with disk_errors(self.directory):
            kept = next(
                one for n in itertools.count(1) if not (one := path.with_name(f"{path.name}.damaged-{n}")).exists()
            )
            if copy:
                with path.open("rb") as source, kept.open("xb") as target:
                    shutil.copyfileobj(source, target)
                    sync_file(target)
            else:
                path.replace(kept)
            sync_directory(path.parent)
        text = f"{path} is damaged: {_without_path(path, reason)}; it is kept as {kept.name}, and {effect}"
        logger.warning("%s", text)
        self.put_aside.append(SetAside(path, kept, text))


def _without_path(path: Path, reason: object) -> object:
    """Returns the reason for damage; of an error only the reason, with the file's name if `path` is its folder."""
    if isinstance(reason, KeyError):
        return f"it has no {reason.args[0]}"
    if not isinstance(reason, DamagedStateError) or not reason.reason:
        return reason
    return reason.reason if reason.path == path else f"{reason.path.name}: {reason.reason}"
