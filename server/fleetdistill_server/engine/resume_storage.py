"""The newest resume point of a training, as a blob of the store and a file that names it.

No row refers to the blob: sweeps delete it an hour after a crash, and forgetting a device deletes it immediately.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from fleetdistill.errors import DamagedError, StateError, StoreError
from fleetdistill.state import failpoints
from fleetdistill.state.durable import rename_durably
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill_server.store.blobs import Blobs, disk_errors

FILE = "training.json"


class ResumeStorage:
    """Implements `fleetdistill_server.training.resume.Storage`.

    Args:
        blobs: Blobs of the store.
        directory: Directory of the file that names the blob.
    """

    def __init__(self, blobs: Blobs, directory: Path) -> None:
        self._blobs = blobs
        self._file = directory / FILE

    def save(self, key: str, state: Any) -> None:
        before = self._named()
        sha256 = self._blobs.put_state(pack_state(state))
        failpoints.hit("engine.training.before-name")
        self._name(key, sha256)
        failpoints.hit("engine.training.after-name")
        if before is not None and before[1] != sha256:
            self._blobs.drop(before[1])

    def load(self, key: str) -> Any | None:
        named = self._named()
        if named is None or named[0] != key:
            return None
        with contextlib.suppress(DamagedError, StateError):
            return unpack_state(self._blobs.get_state(named[1]))
        return None

    def clear(self) -> None:
        named = self._named()
        if named is None:
            return
        with disk_errors(f"deleting {self._file}"):
            self._file.unlink(missing_ok=True)
        self._blobs.drop(named[1])

    def _name(self, key: str, sha256: bytes) -> None:
        written = self._file.with_suffix(".new")
        with disk_errors(f"writing {self._file}"):
            written.write_text(json.dumps({"key": key, "sha256": sha256.hex()}), encoding="utf-8")
            rename_durably(written, self._file)

    def _named(self) -> tuple[str, bytes] | None:
        """Returns key and digest; None if there is no file, or if it is damaged."""
        with contextlib.suppress(OSError, ValueError, KeyError, StoreError):
            named = json.loads(self._file.read_text(encoding="utf-8"))
            return str(named["key"]), bytes.fromhex(named["sha256"])
        return None
