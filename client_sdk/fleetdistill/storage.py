"""A device's state directory: identity, committed state, and the outbox with the one answer that is under way.

    lock                    held while a Device is open
    device.json             id, run, secret, server-given terms
    profile.bin             the last accepted profile, so that an idle device needs no torch
    state.safetensors       state after the last answer that has a receipt
    proxy/                  header.bin, data.bin: the run's proxy set, fetched once and held against its digest
    delivered.safetensors   the model that the app uses
    model.onnx              the same as ONNX, where the app wants it
    model.onnx.due          the round whose delivered model is still to be exported
    outbox/                 header.bin, data.bin, candidate.safetensors, delivered.safetensors where the app's model is
                            to be replaced, then manifest.json, which makes it count

An answer, the state that produced it and the model that it delivers are written and fsynced *before* anything is sent;
the receipt promotes both by renames. Whatever the moment of a crash, `Storage.pending` tells what is left to settle.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from google.protobuf.message import DecodeError

from fleetdistill.errors import StateError, WireError
from fleetdistill.file_lock import lock_file
from fleetdistill.transfer import checked
from fleetdistill.verdict import Verdict
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import knowledge_pb2


@dataclass(frozen=True)
class Pending:
    """An answer in the outbox.

    Attributes:
        round, step_number, attempt: Name of the upload.
        samples: Weight of the answer.
        verdict: What becomes of the app's model with the receipt; None where the device's round goes on.
        scores: Confusion matrices of the round's model by split of the app's data, which the app is told with the
            receipt.
    """

    round: int
    step_number: int
    attempt: int
    samples: int
    verdict: Verdict | None = None
    scores: dict[str, list[list[int]]] = field(default_factory=dict)


class Storage:
    """Opens a state directory for one Device at a time.

    Raises:
        StateError: It is in use by another process, or cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._outbox = directory / "outbox"
        with _disk_errors(directory):
            self._outbox.mkdir(parents=True, exist_ok=True)
            lock = lock_file(directory / "lock")
        if lock is None:
            raise StateError(f"{directory} is in use by another device; give each device a state directory of its own")
        self._lock = lock

    def close(self) -> None:
        """Lets another process use the directory."""
        self._lock.close()

    # --- identity

    def load_identity(self) -> dict[str, Any]:
        """What `save_identity` saved; empty for a new directory."""
        data = self.load("device.json")
        return {} if data is None else _json_object(self.directory / "device.json", data)

    def save_identity(self, identity: dict[str, Any]) -> None:
        """Keeps id, run and secret; the secret is readable by the owner only."""
        self._write("device.json", json.dumps(identity, indent=1).encode(), mode=0o600)

    def load(self, name: str) -> bytes | None:
        """A file of the directory, or None."""
        path = self.directory / name
        with _disk_errors(self.directory):
            return path.read_bytes() if path.exists() else None

    def save(self, name: str, data: bytes) -> None:
        """Writes a file of the directory whole or not at all."""
        self._write(name, data)

    # --- payloads that serve many rounds

    def remove(self, name: str) -> None:
        """Removes a file of the state directory, if it is there."""
        with _disk_errors(self.directory):
            (self.directory / name).unlink(missing_ok=True)

    def keep_payload(self, name: str, payload: Payload) -> None:
        """Keeps a downloaded payload in the folder `name`."""
        with _disk_errors(self.directory):
            (self.directory / name).mkdir(exist_ok=True)
        self._write(f"{name}/data.bin", payload.source.read(0, payload.data_bytes))
        self._write(f"{name}/header.bin", payload.header().SerializeToString())

    def kept_payload(self, name: str, sha256: bytes) -> Payload | None:
        """The payload in the folder `name`; None if it is missing, damaged or another one: then fetch it."""
        header, data = self.load(f"{name}/header.bin"), self.load(f"{name}/data.bin")
        if header is None or data is None:
            return None
        try:
            return checked(knowledge_pb2.PayloadHeader.FromString(header), data, sha256)
        except (DecodeError, WireError):
            return None

    # --- outbox

    def put_answer(self, pending: Pending, payload: Payload, candidate: bytes, delivered: bytes | None = None) -> None:
        """Makes an answer, its candidate state and the app's next model durable, before anything is sent."""
        with _disk_errors(self.directory):
            with (self._outbox / "data.bin").open("wb") as file:
                for piece in wire.pieces(payload.source, 0, payload.data_bytes):
                    file.write(piece)
                _sync(file)
            self._write("outbox/header.bin", payload.header().SerializeToString())
            self._write("outbox/candidate.safetensors", candidate)
            if delivered is None:
                (self._outbox / "delivered.safetensors").unlink(missing_ok=True)  # an earlier crash may have left one
            else:
                self._write("outbox/delivered.safetensors", delivered)
            self._write("outbox/manifest.json", json.dumps(asdict(pending)).encode())

    def pending(self) -> Pending | None:
        """The answer that waits for its receipt, if any."""
        data = self.load("outbox/manifest.json")
        if data is None:
            return None
        if not (self._outbox / "candidate.safetensors").exists():
            self.drop_answer()  # a crash fell between promoting and clearing
            return None
        path = self._outbox / "manifest.json"
        try:
            found = _json_object(path, data)
            verdict = found.pop("verdict")
            return Pending(**found, verdict=Verdict(**verdict) if verdict else None)
        except (TypeError, KeyError) as error:
            raise _damaged(path, error) from error

    @contextlib.contextmanager
    def answer(self) -> Iterator[Payload]:
        """Opens the payload in the outbox. Raises StateError if a file of it is missing or damaged."""
        path = self._outbox / "header.bin"
        try:
            header = knowledge_pb2.PayloadHeader.FromString(self.load("outbox/header.bin") or b"")
            slots = wire.slots(header.parts)
        except (DecodeError, WireError) as error:
            raise _damaged(path, error) from error
        if len(header.sha256) != 32:
            raise _damaged(path, "it is empty or missing")
        with _disk_errors(self.directory):
            file = (self._outbox / "data.bin").open("rb")
        with file:
            yield Payload(header.parts, slots, _FileSource(file), header.sha256)

    def promote_answer(self) -> None:
        """The receipt is here: the app's next model becomes the delivered one, then the candidate the state.

        In this order, so that a crash in between finds the answer still pending and does the rest.
        """
        with _disk_errors(self.directory):
            delivered = self._outbox / "delivered.safetensors"
            if delivered.exists():
                delivered.replace(self.directory / "delivered.safetensors")
                _sync_directory(self.directory)
            (self._outbox / "candidate.safetensors").replace(self.directory / "state.safetensors")
            _sync_directory(self.directory)
        self.drop_answer()

    def drop_answer(self) -> None:
        """Empties the outbox; the manifest goes first, so that half an outbox never counts."""
        with _disk_errors(self.directory):
            (self._outbox / "manifest.json").unlink(missing_ok=True)
            _sync_directory(self._outbox)
            for name in ("candidate.safetensors", "delivered.safetensors", "header.bin", "data.bin"):
                (self._outbox / name).unlink(missing_ok=True)

    def _write(self, name: str, data: bytes, mode: int = 0o644) -> None:
        path = self.directory / name
        temporary = path.with_name(path.name + ".new")
        with _disk_errors(self.directory):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                _sync(file)
            temporary.replace(path)
            _sync_directory(path.parent)


class _FileSource:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)


def _json_object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise _damaged(path, error) from error
    if not isinstance(found, dict):
        raise _damaged(path, f"expected an object, found {type(found).__name__}")
    return found


def _damaged(path: Path, why: object) -> StateError:
    return StateError(f"{path} is damaged: {why}; restore it, or use a fresh state directory")


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    if os.name == "nt":  # Windows has no fsync of directories
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(f"the state directory {directory} cannot be used: {error}") from error
