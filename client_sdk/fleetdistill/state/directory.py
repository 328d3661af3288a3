"""A device's state directory: identity, committed state, and the outbox with the one answer that is under way.

    lock                    held while a Device is open
    device.json             id, run, secret; the format of the whole directory, and which SDK wrote it
    profile.bin             the last accepted profile, so that an idle device needs no torch
    rows.txt                which rows its data version names: hex of the version, and of a digest of what the app gave
    state.safetensors       state after the last answer that has a receipt
    downloads/              payloads by digest: the run's proxy set or extractor, the last ask's, the one under way
    delivered.safetensors   the model that the app uses
    model.onnx              the same as ONNX, where the app wants it
    model.onnx.due          the round whose delivered model is still to be exported
    outbox/                 header.bin, data.bin, candidate.safetensors, delivered.safetensors where the app's model is
                            to be replaced, then manifest.json, which makes it count; tries.txt: how often it was sent;
                            outcome.json: what became of it, until the app has been told
    last_outcome.json       the one before, of which the app has been told

An answer, the state that produced it and the model that it delivers are written and fsynced *before* anything is sent;
the receipt promotes both by renames. Whatever the moment of a crash, `Storage.pending` tells what is left to settle and
`Storage.outcome` what is left to tell. No answer takes the place of one that has no receipt yet.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from google.protobuf.message import DecodeError

from fleetdistill.errors import NoRoomError, StateError, WireError
from fleetdistill.state import failpoints
from fleetdistill.state.disk import disk_errors, free_bytes
from fleetdistill.state.durable import make_directory, rename_durably, sync_directory, sync_file
from fleetdistill.state.file_lock import lock_file
from fleetdistill.verdict import Verdict
from fleetdistill.version import VERSION
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import knowledge_pb2

FORMAT = 2
"""Of the state directory. It grows when an older SDK could not read what a newer one writes; 1 is that of 0.1."""
MAX_SPOOL_BYTES = 16 << 30
"""Most bytes of an answer with its states, or of one download, unless the app says otherwise."""


@dataclass(frozen=True)
class Pending:
    """An answer in the outbox.

    Attributes:
        round, step_number, attempt: Name of the upload.
        samples: Weight of the answer.
        verdict: What becomes of the app's model with the receipt; None where the device's round goes on.
        scores: Confusion matrices of the round's model by split of the app's data, which the app is told with the
            receipt.
        payload: SHA-256 of the question that it answers, hex; empty where the ask had none, and from an SDK of 0.1.
    """

    round: int
    step_number: int
    attempt: int
    samples: int
    verdict: Verdict | None = None
    scores: dict[str, list[list[int]]] = field(default_factory=dict)
    payload: str = ""

    @property
    def name(self) -> tuple[int, int, int]:
        """Round, step number and attempt."""
        return self.round, self.step_number, self.attempt


@dataclass(frozen=True)
class Outcome:
    """What became of an answer.

    Attributes:
        pending: The answer.
        receipt: Id of its receipt; empty where there is none.
        code: Why there is none, of `fleetdistill.wire.codes`; empty with a receipt.
        text: The same as a sentence.
        details: Further facts of a refusal.
        tries: How often it was sent, or was about to be.
    """

    pending: Pending
    receipt: str = ""
    code: str = ""
    text: str = ""
    details: dict[str, str] = field(default_factory=dict)
    tries: int = 0


class Storage:
    """Opens a state directory for one Device at a time.

    Args:
        directory: Made if need be.
        max_answer_bytes: Most bytes of an answer with the states that go with it.

    Raises:
        StateError: It is in use by another process, or cannot be written.
    """

    def __init__(self, directory: Path, max_answer_bytes: int = MAX_SPOOL_BYTES) -> None:
        self.directory = directory
        self._max_answer_bytes = max_answer_bytes
        self._outbox = directory / "outbox"
        with disk_errors(directory):
            make_directory(directory)
            self._outbox.mkdir(exist_ok=True)  # its name is synced with the first file of the directory
            lock = lock_file(directory / "lock")
        if lock is None:
            raise StateError(f"{directory} is in use by another device; give each device a state directory of its own")
        self._lock = lock

    def close(self) -> None:
        """Lets another process use the directory."""
        self._lock.close()

    # --- identity

    def load_identity(self) -> dict[str, Any]:
        """What `save_identity` saved; empty for a new directory.

        Raises:
            StateError: It is damaged, or the directory is a newer SDK's.
        """
        saved = self._device_file()
        _check_format(self.directory, saved)
        return {name: value for name, value in saved.items() if name not in ("format", "sdk")}

    def _device_file(self) -> dict[str, Any]:
        data = self.load("device.json")
        return {} if data is None else _json_object(self.directory / "device.json", data)

    def save_identity(self, identity: dict[str, Any]) -> None:
        """Keeps id, run and secret, beside whatever else is there; the secret is readable by the owner only."""
        failpoints.hit("device.identity.before-save")
        saved = {**self._device_file(), **identity, "format": FORMAT, "sdk": VERSION}
        self._write("device.json", json.dumps(saved, indent=1).encode(), mode=0o600)
        failpoints.hit("device.identity.after-save")

    def load(self, name: str) -> bytes | None:
        """A file of the directory, or None."""
        path = self.directory / name
        with disk_errors(self.directory):
            return path.read_bytes() if path.exists() else None

    def save(self, name: str, data: bytes) -> None:
        """Writes a file of the directory whole or not at all."""
        self._write(name, data)

    def remove(self, name: str) -> None:
        """Removes a file of the state directory, if it is there."""
        with disk_errors(self.directory):
            (self.directory / name).unlink(missing_ok=True)

    # --- rows

    def note_rows(self, version: bytes, digest: bytes | None) -> None:
        """Keeps which rows a profile's data version names; the digest is that of what the app gave, if it has one.

        Not fsynced, and not kept on a full disk: without it the rows are only looked at once more than is needed.
        """
        self._write_rows(f"{version.hex()}\n{(digest or b'').hex()}")

    def names_rows(self, version: bytes, digest: bytes | None) -> bool:
        """Whether this data version names the app's rows; without a digest they are, unless `forget_rows` was told."""
        noted = self.load("rows.txt")
        if noted is None:
            return digest is None
        known, separator, given = noted.decode(errors="replace").partition("\n")
        return bool(separator) and known == version.hex() and digest in (None, _from_hex(given))

    def forget_rows(self) -> None:
        """The app has other rows: no version names them yet, and a restart will know."""
        self._write_rows("")

    def _write_rows(self, text: str) -> None:
        with contextlib.suppress(NoRoomError), disk_errors(self.directory):
            (self.directory / "rows.txt").write_text(text)

    # --- outbox

    def put_answer(self, pending: Pending, payload: Payload, candidate: bytes, delivered: bytes | None = None) -> None:
        """Makes an answer, its candidate state and the app's next model durable, before anything is sent.

        Raises:
            NoRoomError: It is over the bound, or the disk is full. What was there before is untouched.
            StateError: Another answer still waits for its receipt.
        """
        self._check_waits_for_none(pending)
        self._check_room(payload.data_bytes + len(candidate) + len(delivered or b""))
        try:
            self._put_answer(pending, payload, candidate, delivered)
        except NoRoomError:
            self.drop_answer()  # half an answer must not take the room that is left
            raise

    def _check_waits_for_none(self, pending: Pending) -> None:
        waiting = self.pending()
        if waiting is not None and waiting.name != pending.name:
            raise StateError(
                f"{self._outbox} holds the answer {waiting.name} (round, step, attempt), which has no receipt yet, so "
                f"{pending.name} cannot take its place; settle it first"
            )

    def _check_room(self, needed: int) -> None:
        if needed > self._max_answer_bytes:
            raise NoRoomError(
                f"the answer and its state are {needed} bytes, the device keeps at most {self._max_answer_bytes} "
                "(max_spool_bytes)"
            )
        free = free_bytes(self.directory)
        if needed > free:
            raise NoRoomError(f"the answer and its state are {needed} bytes, the disk has {free} free")

    def _put_answer(self, pending: Pending, payload: Payload, candidate: bytes, delivered: bytes | None) -> None:
        with disk_errors(self.directory):
            failpoints.hit("device.outbox.before-data")
            for name in ("delivered.safetensors", "tries.txt"):  # an earlier crash may have left them
                (self._outbox / name).unlink(missing_ok=True)
            self._put("data.bin", wire.pieces(payload.source, 0, payload.data_bytes))
            self._put("header.bin", [payload.header().SerializeToString()])
            failpoints.hit("device.outbox.before-candidate")
            self._put("candidate.safetensors", [candidate])
            if delivered is not None:
                self._put("delivered.safetensors", [delivered])
            sync_directory(self._outbox)  # before the manifest's name can be there
            failpoints.hit("device.outbox.before-manifest")
            self._write("outbox/manifest.json", json.dumps({"format": FORMAT, **asdict(pending)}).encode())
            failpoints.hit("device.outbox.after-manifest")

    def _put(self, name: str, pieces: Iterable[bytes]) -> None:
        """Writes a file of the outbox in place: it does not count before the manifest does."""
        with (self._outbox / name).open("wb") as file:
            for piece in pieces:
                file.write(piece)
            sync_file(file)

    def pending(self) -> Pending | None:
        """The answer that waits for its receipt, if any."""
        data = self.load("outbox/manifest.json")
        if data is None:
            return None
        if not (self._outbox / "candidate.safetensors").exists():
            self.drop_answer()  # a crash fell between promoting and clearing
            return None
        return _pending(self._outbox / "manifest.json", data)

    def count_try(self) -> int:
        """Counts one more try to send the answer; returns how many there were.

        Not fsynced, and not counted on a full disk: no count is worth an answer.
        """
        tries = self.tries + 1
        with contextlib.suppress(NoRoomError), disk_errors(self.directory):
            (self._outbox / "tries.txt").write_text(str(tries))
        return tries

    @property
    def tries(self) -> int:
        """How often the answer in the outbox was sent, or was about to be."""
        found = self.load("outbox/tries.txt") or b""
        return int(found) if found.isdigit() else 0

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
        with disk_errors(self.directory):
            file = (self._outbox / "data.bin").open("rb")
        with file:
            yield Payload(header.parts, slots, _FileSource(file), header.sha256)

    def promote_answer(self) -> None:
        """The receipt is here: the app's next model becomes the delivered one, then the candidate the state.

        In this order, so that a crash in between finds the answer still pending and does the rest.
        """
        with disk_errors(self.directory):
            failpoints.hit("device.promote.before-renames")
            delivered = self._outbox / "delivered.safetensors"
            if delivered.exists():
                delivered.replace(self.directory / "delivered.safetensors")
                sync_directory(self.directory)
            failpoints.hit("device.promote.between-renames")
            (self._outbox / "candidate.safetensors").replace(self.directory / "state.safetensors")
            sync_directory(self.directory)
            failpoints.hit("device.promote.after-renames")
        self.drop_answer()

    def drop_answer(self) -> None:
        """Empties the outbox; the manifest goes first, so that half an outbox never counts."""
        with disk_errors(self.directory):
            (self._outbox / "manifest.json").unlink(missing_ok=True)
            sync_directory(self._outbox)
            failpoints.hit("device.drop.after-manifest")
            for name in ("candidate.safetensors", "delivered.safetensors", "header.bin", "data.bin", "tries.txt"):
                (self._outbox / name).unlink(missing_ok=True)
            failpoints.hit("device.drop.after-files")

    # --- what the app is to be told

    def note_outcome(self, outcome: Outcome) -> None:
        """Keeps what became of the answer, before the outbox is emptied: whatever happens now, the app is told."""
        failpoints.hit("device.outcome.before-note")
        self._write("outbox/outcome.json", json.dumps({"format": FORMAT, **asdict(outcome)}).encode())
        failpoints.hit("device.outcome.after-note")

    def outcome(self) -> Outcome | None:
        """What the app has not been told yet, if anything; a damaged note counts as none."""
        return self._outcome("outbox/outcome.json")

    def outcome_told(self) -> None:
        """The app knows. A crash before this tells it again."""
        with disk_errors(self.directory):
            (self._outbox / "outcome.json").replace(self.directory / "last_outcome.json")
            failpoints.hit("device.outcome.after-told")

    def next_attempt(self, number: int, step_number: int) -> int:
        """The number of the next attempt to answer an ask, from 1."""
        last = self._outcome("last_outcome.json")
        same = last is not None and last.pending.name[:2] == (number, step_number)
        return last.pending.attempt + 1 if last is not None and same else 1

    def _outcome(self, name: str) -> Outcome | None:
        data = self.load(name)
        if data is None:
            return None
        try:
            found = _json_object(self.directory / name, data)
            known = {one.name for one in fields(Outcome)} - {"pending"}
            pending = _pending(self.directory / name, json.dumps(found["pending"]).encode())
            return Outcome(pending, **{key: value for key, value in found.items() if key in known})
        except (StateError, KeyError):
            return None

    def _write(self, name: str, data: bytes, mode: int = 0o644) -> None:
        path = self.directory / name
        temporary = path.with_name(path.name + ".new")
        with disk_errors(self.directory):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            rename_durably(temporary, path)


class _FileSource:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)


def _from_hex(text: str) -> bytes:
    """The bytes, or none where the text is no hex."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


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


def _pending(path: Path, data: bytes) -> Pending:
    found = _json_object(path, data)
    _check_format(path, found)
    known = {one.name for one in fields(Pending)}
    if missing := sorted({one.name for one in fields(Pending) if _is_required(one)} - found.keys()):
        raise _damaged(path, f"it lacks {', '.join(missing)}")
    if unknown := sorted(found.keys() - known - {"format"}):
        raise _newer(path, f"it has {', '.join(unknown)}")
    try:
        verdict = found.pop("verdict", None)
        found.pop("format", None)
        pending = Pending(**found, verdict=Verdict(**verdict) if verdict else None)
        bytes.fromhex(pending.payload)
        return pending
    except (TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def _is_required(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _check_format(path: Path, saved: dict[str, Any]) -> None:
    """What has no format is of 0.1, which had none to say."""
    found = saved.get("format", 1)
    if not isinstance(found, int):
        raise _damaged(path, f"its format is {found!r}")
    if found > FORMAT:
        raise _newer(path, f"it has format {found}, SDK {saved.get('sdk', 'unknown')}")


def _newer(path: Path, what: str) -> StateError:
    return StateError(
        f"{path} was written by a newer SDK: {what}; this one is {VERSION} and reads formats up to {FORMAT}: "
        "update it, or use a fresh state directory"
    )
