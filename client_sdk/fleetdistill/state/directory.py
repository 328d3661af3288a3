"""A device's state directory: identity, committed state, and the outbox with the answer in progress.

    lock                    locked while a Device is open
    device.json             id, run and secret; format version of the directory, and version of the SDK that wrote it
    profile.bin             the last accepted profile, so that an idle device does not load torch
    contract.bin            the contract of the run, so that predictions do not need the server
    rows.txt                the data version in that profile, and a digest of the app's data; both hexadecimal
    state.safetensors       the committed state: after the last answer with a receipt
    weights/                weights to which other files refer, written by `fleetdistill.state.weights`
    downloads/              payloads by digest: the run's proxy set or extractor, the last ask's, an incomplete one
    delivered.safetensors   the app's model
    model.onnx              the app's model as ONNX, if the app wants it
    deployed.json, model.onnx.due, roll-back.due, pinned, versions/
                            the versions of the app's model, written by `fleetdistill.deployment.versions`
    usage.json              bytes and seconds of computing used today, if the app has set budgets
    pace.json               the time before which the server asked the device not to call
    outbox/                 header.bin, data.bin, candidate.safetensors, delivered.safetensors if the app's model is to
                            be replaced, then manifest.json, which commits the others; tries.txt: number of tries to
                            send; outcome.json: outcome of the answer, until the app has its events
    last_outcome.json       outcome of the previous answer, whose events the app has
    ledger.jsonl            what the device has sent about its data, for its user
    *.damaged-N             damaged files that were put aside
    erasing                 exists while the directory is being erased

`fleetdistill.state.outbox` writes the files in `outbox/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fleetdistill.errors import DamagedStateError, StateError
from fleetdistill.state import failpoints
from fleetdistill.state.disk import disk_errors
from fleetdistill.state.durable import make_directory
from fleetdistill.state.file_lock import lock_file
from fleetdistill.state.files import Files
from fleetdistill.state.format import FORMAT, check_format, identity_error, json_object, sealed_json
from fleetdistill.state.outbox import Outbox
from fleetdistill.state.own_files import DEVICE, complete_erasure, erase
from fleetdistill.state.sent_ledger import SentLedger
from fleetdistill.version import VERSION

__all__ = ["Storage"]

MAX_SPOOL_BYTES = 16 << 30
"""Default maximum size of an answer with its states, and of one download, in bytes."""
_ROWS = "rows.txt"


class Storage(Files):
    """An open state directory, locked for one Device.

    Args:
        directory: Path of the directory, created if necessary.
        max_answer_bytes: Maximum size of an answer with its states, in bytes.

    Attributes:
        outbox: The answer in progress.
        ledger: What the device has sent.

    Raises:
        StateError: Another process uses the directory, or it cannot be written.
    """

    def __init__(self, directory: Path, max_answer_bytes: int = MAX_SPOOL_BYTES) -> None:
        super().__init__(directory)
        with disk_errors(directory):
            make_directory(directory)
            lock = lock_file(directory / "lock")
        if lock is None:
            raise StateError(
                f"{directory} is in use by another device, of this process or another, that is not closed; each device "
                "requires its own state directory"
            )
        self._lock = lock
        complete_erasure(self)
        with disk_errors(directory):
            (directory / "outbox").mkdir(exist_ok=True)  # fsynced with the first file of the directory
        self.outbox = Outbox(self, max_answer_bytes)
        self.ledger = SentLedger(self)

    def close(self) -> None:
        """Releases the lock of the directory."""
        self._lock.close()

    # --- identity

    def load_identity(self) -> dict[str, Any]:
        """Returns the fields that `save_identity` saved; empty for a new directory.

        Raises:
            StateError: The file is damaged, or a newer SDK wrote the directory.
        """
        saved = self._device_file()
        try:
            check_format(self.directory, saved)
        except DamagedStateError as error:
            raise identity_error(self.directory / DEVICE, f"is damaged: {error.reason}") from error
        return {name: value for name, value in saved.items() if name not in ("format", "sdk")}

    def _device_file(self) -> dict[str, Any]:
        data, path = self.load(DEVICE), self.directory / DEVICE
        try:
            return {} if data is None else json_object(path, data)
        except DamagedStateError as error:
            raise identity_error(path, f"is damaged: {error.reason}") from error

    def save_identity(self, identity: dict[str, Any]) -> None:
        """Saves id, run and secret with file mode 0600; other fields of the file are kept."""
        failpoints.hit("device.identity.before-save")
        saved = {**self._device_file(), **identity, "format": FORMAT, "sdk": VERSION}
        self.save(DEVICE, sealed_json(saved, indent=1), mode=0o600)
        failpoints.hit("device.identity.after-save")

    # --- data version

    def save_data_version(self, version: bytes, digest: bytes | None) -> None:
        """Saves the data version of the last check-in with the digest of the app's data, or None without a digest.

        Not fsynced and skipped on a full disk: without the file the data are compared once more.
        """
        self.note(_ROWS, f"{version.hex()}\n{(digest or b'').hex()}".encode())

    def is_data_version(self, version: bytes, digest: bytes | None) -> bool:
        """Returns whether a data version is that of the app's data.

        If the data have no digest, returns True unless `clear_data_version` was called.
        """
        saved = self.load(_ROWS)
        if saved is None:
            return digest is None
        known, separator, saved_digest = saved.decode(errors="replace").partition("\n")
        return bool(separator) and known == version.hex() and digest in (None, _from_hex(saved_digest))

    def clear_data_version(self) -> None:
        """Clears the data version after the app has replaced its data. The change persists across restarts."""
        self.note(_ROWS, b"")


def _from_hex(text: str) -> bytes:
    """Returns the bytes of a hexadecimal text; empty if it is not hexadecimal."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def erase_directory(directory: Path) -> None:
    """Erases the SDK's files in a state directory that no device uses, except for its lock and the privacy ledger.

    Raises:
        StateError: A device uses the directory, or a file cannot be deleted.
    """
    storage = Storage(directory)
    try:
        erase(storage)
    finally:
        storage.close()
