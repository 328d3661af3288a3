"""The outbox of a state directory: the answer in progress, and the outcome of the previous one.

An answer, the state after it and the model that it delivers are written and fsynced *before* anything is sent; the
receipt commits both by renames. After a crash at any time, `Outbox.pending` is the answer that still has to be settled
and `Outbox.outcome` the outcome that still has to be reported to the app. An answer without a receipt is never
overwritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import google_crc32c
from google.protobuf.message import DecodeError

from fleetdistill.errors import DamagedStateError, NoRoomError, StateError, WireError
from fleetdistill.replacement import Replacement
from fleetdistill.state import failpoints
from fleetdistill.state.disk import disk_errors, free_bytes
from fleetdistill.state.durable import sync_directory, sync_file
from fleetdistill.state.files import Files
from fleetdistill.state.format import FORMAT, check_format, damaged_error, json_object, newer_error, sealed_json
from fleetdistill.state.weights import without_weights
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.digests import Check, identity
from fleetdistill.wire.v1 import knowledge_pb2

_MANIFEST, _DIGESTS = "outbox/manifest.json", "digests"


@dataclass(frozen=True)
class Pending:
    """An answer in the outbox.

    Attributes:
        round, step_number, attempt: Name of the upload.
        samples: Number of samples behind the answer.
        replacement: Whether the app's model is replaced with the receipt; None if the round continues.
        scores: `Confusion.cells` of the round's model by split, emitted with the receipt.
        payload: SHA-256 of the ask's payload in hex; empty if the ask had none.
        step: Name of the step.
        columns: Columns of each part, by name of the part.
    """

    round: int
    step_number: int
    attempt: int
    samples: int
    replacement: Replacement | None = None
    scores: dict[str, list[list[int]]] = field(default_factory=dict)
    payload: str = ""
    step: str = ""
    columns: dict[str, list[str]] = field(default_factory=dict)

    @property
    def name(self) -> tuple[int, int, int]:
        """Round, step number and attempt of the upload."""
        return self.round, self.step_number, self.attempt


@dataclass(frozen=True)
class Outcome:
    """Outcome of an answer: acknowledged or refused.

    Attributes:
        pending: The answer.
        receipt: Id of its receipt; empty if it was refused.
        code: Reason of the refusal, a `fleetdistill.wire.codes.Code`; empty with a receipt.
        text: Reason of the refusal as a sentence.
        details: Details of the refusal.
        tries: Number of tries to send the answer.
    """

    pending: Pending
    receipt: str = ""
    code: str = ""
    text: str = ""
    details: dict[str, str] = field(default_factory=dict)
    tries: int = 0


class Outbox:
    """The folder `outbox` of a state directory.

    Args:
        files: Files of the state directory.
        max_answer_bytes: Maximum size of an answer with its states, in bytes.
    """

    def __init__(self, files: Files, max_answer_bytes: int) -> None:
        self._files, self._max_answer_bytes = files, max_answer_bytes
        self.directory = files.directory
        self._outbox = files.directory / "outbox"
        self._checked = False  # whether the files of the answer in the outbox are known to be undamaged

    def put(self, pending: Pending, payload: Payload, candidate: bytes, delivered: bytes | None = None) -> None:
        """Stores an answer, its candidate state and the app's next model durably, before anything is sent.

        Raises:
            NoRoomError: The answer exceeds the limit, or the disk is full; the committed state is unchanged.
            StateError: Another answer has no receipt yet.
        """
        self._check_vacant(pending)
        candidate = without_weights(self._files, candidate)
        delivered = None if delivered is None else without_weights(self._files, delivered)
        self._check_room(payload.data_bytes + len(candidate) + len(delivered or b""))
        try:
            self._write_answer(pending, payload, candidate, delivered)
        except NoRoomError:
            self.drop()  # frees the space of the incomplete answer
            raise

    def _check_vacant(self, pending: Pending) -> None:
        waiting = self.pending()
        if waiting is not None and waiting.name != pending.name:
            raise StateError(
                f"{self._outbox} has the answer {waiting.name} (round, step, attempt) without a receipt; wait "
                f"for its receipt before storing {pending.name}"
            )

    def _check_room(self, needed: int) -> None:
        if needed > self._max_answer_bytes:
            raise NoRoomError(
                f"the answer and its state are {needed} bytes, the limit is {self._max_answer_bytes} bytes; "
                "raise Budgets(spool_bytes=...)"
            )
        free = free_bytes(self.directory)
        if needed > free:
            raise NoRoomError(
                f"the answer and its state are {needed} bytes, but the disk has {free} bytes free; free some space"
            )

    def _write_answer(self, pending: Pending, payload: Payload, candidate: bytes, delivered: bytes | None) -> None:
        with disk_errors(self.directory):
            failpoints.hit("device.outbox.before-data")
            for name in ("delivered.safetensors", "tries.txt"):  # possibly left by a crash
                (self._outbox / name).unlink(missing_ok=True)
            self._write_file("data.bin", wire.pieces(payload.source, 0, payload.data_bytes))
            self._write_file("header.bin", [payload.header().SerializeToString()])
            failpoints.hit("device.outbox.before-candidate")
            self._write_file("candidate.safetensors", [candidate])
            if delivered is not None:
                self._write_file("delivered.safetensors", [delivered])
            sync_directory(self._outbox)  # before the manifest is written
            failpoints.hit("device.outbox.before-manifest")
            digests = {"candidate": _crc(candidate), "delivered": None if delivered is None else _crc(delivered)}
            self._files.save(_MANIFEST, sealed_json({"format": FORMAT, **asdict(pending), _DIGESTS: digests}))
            self._checked = True
            failpoints.hit("device.outbox.after-manifest")

    def _write_file(self, name: str, pieces: Iterable[bytes]) -> None:
        """Writes a file in place; it has no effect before the manifest exists."""
        with (self._outbox / name).open("wb") as file:
            for piece in pieces:
                file.write(piece)
            sync_file(file)

    def pending(self) -> Pending | None:
        """Returns the answer that has no receipt yet, or None."""
        data = self._files.load(_MANIFEST)
        if data is None:
            return None
        if not (self._outbox / "candidate.safetensors").exists():
            self.drop()  # a crash between commit and cleanup
            return None
        try:
            self._check_files()
            return self.stored()
        except DamagedStateError as error:
            self._files.set_aside("outbox", error, "its answer is dropped; the device continues from its last receipt")
            with disk_errors(self.directory):
                self._outbox.mkdir(exist_ok=True)
            return None

    def _check_files(self) -> None:
        """Checks answer and states once, at the start. A damaged state must not become the committed one."""
        if self._checked:
            return
        digests = json_object(self._outbox / "manifest.json", self._files.load(_MANIFEST) or b"").get(_DIGESTS, {})
        for name, expected in digests.items():
            data = self._files.load(f"outbox/{name}.safetensors")
            if data is not None and expected is not None and _crc(data) != expected:
                raise damaged_error(self._outbox / f"{name}.safetensors", "it does not match its checksum")
        with self.answer() as payload:
            check = self._digest_check(payload.header())
            for piece in wire.pieces(payload.source, 0, payload.data_bytes):
                check.update(piece)
            if not check.matches():
                raise damaged_error(self._outbox / "data.bin", "it does not match its digest")
        self._checked = True

    def _digest_check(self, header: knowledge_pb2.PayloadHeader) -> Check:
        try:
            return Check(header)
        except WireError as error:  # the package for the digest was removed
            raise damaged_error(self._outbox / "header.bin", error) from error

    def stored(self) -> Pending | None:
        """Returns the answer in the outbox without changing anything, not even after a crash."""
        data = self._files.load(_MANIFEST)
        path = self._outbox / "manifest.json"
        return None if data is None else _pending(path, json_object(path, data))

    def count_try(self) -> int:
        """Counts a try to send the answer; returns the number of tries.

        Not fsynced, and skipped on a full disk, because the number is only informative.
        """
        tries = self.tries + 1
        self._files.note("outbox/tries.txt", str(tries).encode())
        return tries

    @property
    def tries(self) -> int:
        """Number of tries to send the answer in the outbox."""
        tries = self._files.load("outbox/tries.txt") or b""
        return int(tries) if tries.isdigit() else 0

    @contextlib.contextmanager
    def answer(self) -> Iterator[Payload]:
        """Context manager that opens the payload in the outbox. Raises StateError if a file is missing or damaged."""
        path = self._outbox / "header.bin"
        try:
            header = knowledge_pb2.PayloadHeader.FromString(self._files.load("outbox/header.bin") or b"")
            slots = wire.slots(header.parts)
        except (DecodeError, WireError) as error:
            raise damaged_error(path, error) from error
        if not identity(header):
            raise damaged_error(path, "the file is empty or missing")
        with disk_errors(self.directory):
            if not (self._outbox / "data.bin").exists():
                raise damaged_error(self._outbox / "data.bin", "the file is missing")
            file = (self._outbox / "data.bin").open("rb")
        with file:
            yield Payload(header.parts, slots, _FileSource(file), header.sha256, header.blake3)

    @property
    def delivered_file(self) -> Path:
        """The app's next model in the outbox; missing if the answer has none."""
        return self._outbox / "delivered.safetensors"

    def promote(self, *, replaced: bool) -> None:
        """Commits an acknowledged answer: renames the app's next model if `replaced`, then the candidate state.

        The order matters: after a crash between the two steps the answer is still pending, and the next start completes
        the commit.
        """
        with disk_errors(self.directory):
            failpoints.hit("device.promote.before-renames")
            delivered = self.delivered_file
            if replaced and delivered.exists():
                delivered.replace(self.directory / "delivered.safetensors")
                sync_directory(self.directory)
            failpoints.hit("device.promote.between-renames")
            (self._outbox / "candidate.safetensors").replace(self.directory / "state.safetensors")
            sync_directory(self.directory)
            failpoints.hit("device.promote.after-renames")
        self.drop()

    def drop(self) -> None:
        """Empties the outbox; removes the manifest first, so that an incomplete outbox is never used."""
        with disk_errors(self.directory):
            (self._outbox / "manifest.json").unlink(missing_ok=True)
            sync_directory(self._outbox)
            failpoints.hit("device.drop.after-manifest")
            for name in ("candidate.safetensors", "delivered.safetensors", "header.bin", "data.bin", "tries.txt"):
                (self._outbox / name).unlink(missing_ok=True)
            failpoints.hit("device.drop.after-files")

    # --- outcomes, for the app

    def save_outcome(self, outcome: Outcome) -> None:
        """Stores an outcome before the outbox is emptied, so that its events are emitted even after a crash."""
        failpoints.hit("device.outcome.before-note")
        self._files.save(
            "outbox/outcome.json",
            sealed_json({"format": FORMAT, **asdict(outcome)}),
        )
        failpoints.hit("device.outcome.after-note")

    def outcome(self) -> Outcome | None:
        """Returns the outcome whose events the app has not received, or None; a damaged one is put aside."""
        return self._outcome("outbox/outcome.json")

    def mark_reported(self) -> None:
        """Marks the outcome as reported. After a crash before this call the events are emitted again."""
        with disk_errors(self.directory):
            (self._outbox / "outcome.json").replace(self.directory / "last_outcome.json")
            failpoints.hit("device.outcome.after-told")

    def last_outcome(self) -> Outcome | None:
        """Returns the last outcome, whether or not the app has its events; changes nothing.

        Raises:
            StateError: The file is damaged.
        """
        return self._read_outcome("outbox/outcome.json") or self._read_outcome("last_outcome.json")

    def next_attempt(self, number: int, step_number: int) -> int:
        """Returns the number of the next attempt to answer an ask, from 1."""
        last = self._outcome("last_outcome.json")
        same = last is not None and last.pending.name[:2] == (number, step_number)
        return last.pending.attempt + 1 if last is not None and same else 1

    def _outcome(self, name: str) -> Outcome | None:
        try:
            return self._read_outcome(name)
        except DamagedStateError as error:
            self._files.set_aside(name, error, "the device continues without it; an event can be missing")
            return None

    def _read_outcome(self, name: str) -> Outcome | None:
        data, path = self._files.load(name), self.directory / name
        if data is None:
            return None
        result = json_object(path, data)
        known = {field.name for field in fields(Outcome)} - {"pending"}
        try:
            pending = _pending(path, result["pending"])
            return Outcome(pending, **{key: value for key, value in result.items() if key in known})
        except (KeyError, TypeError, ValueError) as error:
            raise damaged_error(path, error) from error


def _crc(data: bytes) -> int:
    return int(google_crc32c.value(data))


class _FileSource:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)


def _pending(path: Path, saved: dict[str, Any]) -> Pending:
    result = dict(saved)
    check_format(path, result)
    known = {field.name for field in fields(Pending)}
    if missing := sorted({field.name for field in fields(Pending) if _is_required(field)} - result.keys()):
        raise damaged_error(path, f"missing {', '.join(missing)}")
    if unknown := sorted(result.keys() - known - {"format", _DIGESTS}):
        raise newer_error(path, f"it has {', '.join(unknown)}")
    try:
        replacement = result.pop("replacement", None)
        result.pop("format", None)
        result.pop(_DIGESTS, None)
        pending = Pending(**result, replacement=Replacement(**replacement) if replacement else None)
        bytes.fromhex(pending.payload)
        return pending
    except (TypeError, ValueError) as error:
        raise damaged_error(path, error) from error


def _is_required(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING
