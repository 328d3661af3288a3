"""The private release that a device has made: kept, so that every ask for it gets the same noise."""

from __future__ import annotations

import io
from dataclasses import fields
from typing import Any
from zipfile import BadZipFile

import numpy as np

from fleetdistill.knowledge import ClassSums
from fleetdistill.state import failpoints
from fleetdistill.state.files import Files
from fleetdistill.state.format import damaged_error
from fleetdistill.state.privacy_ledger import RELEASED

_FIELDS = tuple(field.name for field in fields(ClassSums))


class Releases:
    """Stores the last release of a state directory. What it holds was sent, or may be sent, to the server.

    Args:
        files: The state directory.
    """

    def __init__(self, files: Files) -> None:
        self._files = files

    def save(self, name: str, release: ClassSums) -> None:
        """Stores a release durably, in place of the last one.

        Args:
            name: Names the run, the rows and the noise that the release belongs to.
            release: The noisy sums.
        """
        file = io.BytesIO()
        arrays: dict[str, Any] = {field: np.array(getattr(release, field)) for field in _FIELDS}
        np.savez(file, name=np.array(name), **arrays)
        self._files.save(RELEASED, file.getvalue(), mode=0o600)
        failpoints.hit("device.privacy.after-release")

    def load(self, name: str) -> ClassSums | None:
        """Returns the stored release if it has this name, else None.

        Raises:
            StateError: The file is damaged.
        """
        data = self._files.load(RELEASED)
        if data is None:
            return None
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                if str(arrays["name"]) != name:
                    return None
                result = {field: arrays[field] for field in _FIELDS}
        except (ValueError, KeyError, OSError, EOFError, BadZipFile) as error:
            raise damaged_error(self._files.directory / RELEASED, error) from error
        return ClassSums(**{**result, "mu": float(result["mu"]), "discrete": bool(result["discrete"])})
