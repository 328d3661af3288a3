"""The outbox of a state directory: the one answer that is under way, and what became of the one before.

An answer, the state that produced it and the model that it delivers are written and fsynced *before* anything is sent;
the receipt promotes both by renames. Whatever the moment of a crash, `Outbox.pending` is what is left to settle and
`Outbox.outcome` what is left to report to the app. No answer takes the place of one that has no receipt yet.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from google.protobuf.message import DecodeError

from fleetdistill.errors import NoRoomError, StateError, WireError
from fleetdistill.replacement import Replacement
from fleetdistill.state import failpoints
from fleetdistill.state.disk import disk_errors, free_bytes
from fleetdistill.state.durable import sync_directory, sync_file
from fleetdistill.state.files import Files
from fleetdistill.state.format import FORMAT, check_format, damaged_error, json_object, newer_error
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import knowledge_pb2

_KEYS = {"replacement": "verdict"}
"""Names of fields in the format where they differ."""


@dataclass(frozen=True)
class Pending:
    """An answer in the outbox.

    Attributes:
        round, step_number, attempt: Name of the upload.
        samples: Weight of the answer.
        replacement: What becomes of the app's model with the receipt; None where the device's round goes on.
        scores: Confusion matrices of the round's model by split of the app's data, an event with the
            receipt.
        payload: SHA-256 of the question that it answers, hex; empty where the ask had none, and from an SDK of 0.1.
    """

    round: int
    step_number: int
    attempt: int
    samples: int
    replacement: Replacement | None = None
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


class Outbox:
    """The folder `outbox` of a state directory.

    Args:
        files: The state directory.
        max_answer_bytes: Most bytes of an answer with the states that go with it.
    """

    def __init__(self, files: Files, max_answer_bytes: int) -> None:
        self._files, self._max_answer_bytes = files, max_answer_bytes
        self.directory = files.directory
        self._outbox = files.directory / "outbox"

    def put(self, pending: Pending, payload: Payload, candidate: bytes, delivered: bytes | None = None) -> None:
        """Makes an answer, its candidate state and the app's next model durable, before anything is sent.

        Raises:
            NoRoomError: It is over the bound, or the disk is full. What was there before is untouched.
            StateError: Another answer still waits for its receipt.
        """
        self._check_vacant(pending)
        self._check_room(payload.data_bytes + len(candidate) + len(delivered or b""))
        try:
            self._write_answer(pending, payload, candidate, delivered)
        except NoRoomError:
            self.drop()  # half an answer must not take the room that is left
            raise

    def _check_vacant(self, pending: Pending) -> None:
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

    def _write_answer(self, pending: Pending, payload: Payload, candidate: bytes, delivered: bytes | None) -> None:
        with disk_errors(self.directory):
            failpoints.hit("device.outbox.before-data")
            for name in ("delivered.safetensors", "tries.txt"):  # an earlier crash may have left them
                (self._outbox / name).unlink(missing_ok=True)
            self._write_file("data.bin", wire.pieces(payload.source, 0, payload.data_bytes))
            self._write_file("header.bin", [payload.header().SerializeToString()])
            failpoints.hit("device.outbox.before-candidate")
            self._write_file("candidate.safetensors", [candidate])
            if delivered is not None:
                self._write_file("delivered.safetensors", [delivered])
            sync_directory(self._outbox)  # before the manifest's name can be there
            failpoints.hit("device.outbox.before-manifest")
            self._files.save("outbox/manifest.json", json.dumps({"format": FORMAT, **_saved(pending)}).encode())
            failpoints.hit("device.outbox.after-manifest")

    def _write_file(self, name: str, pieces: Iterable[bytes]) -> None:
        """Writes a file of the outbox in place: it does not count before the manifest does."""
        with (self._outbox / name).open("wb") as file:
            for piece in pieces:
                file.write(piece)
            sync_file(file)

    def pending(self) -> Pending | None:
        """The answer that waits for its receipt, if any."""
        data = self._files.load("outbox/manifest.json")
        if data is None:
            return None
        if not (self._outbox / "candidate.safetensors").exists():
            self.drop()  # a crash fell between promoting and clearing
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
        found = self._files.load("outbox/tries.txt") or b""
        return int(found) if found.isdigit() else 0

    @contextlib.contextmanager
    def answer(self) -> Iterator[Payload]:
        """Opens the payload in the outbox. Raises StateError if a file of it is missing or damaged."""
        path = self._outbox / "header.bin"
        try:
            header = knowledge_pb2.PayloadHeader.FromString(self._files.load("outbox/header.bin") or b"")
            slots = wire.slots(header.parts)
        except (DecodeError, WireError) as error:
            raise damaged_error(path, error) from error
        if len(header.sha256) != 32:
            raise damaged_error(path, "it is empty or missing")
        with disk_errors(self.directory):
            file = (self._outbox / "data.bin").open("rb")
        with file:
            yield Payload(header.parts, slots, _FileSource(file), header.sha256)

    def promote(self) -> None:
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
        self.drop()

    def drop(self) -> None:
        """Empties the outbox; the manifest goes first, so that half an outbox never counts."""
        with disk_errors(self.directory):
            (self._outbox / "manifest.json").unlink(missing_ok=True)
            sync_directory(self._outbox)
            failpoints.hit("device.drop.after-manifest")
            for name in ("candidate.safetensors", "delivered.safetensors", "header.bin", "data.bin", "tries.txt"):
                (self._outbox / name).unlink(missing_ok=True)
            failpoints.hit("device.drop.after-files")

    # --- outcomes, for the app

    def note_outcome(self, outcome: Outcome) -> None:
        """Keeps what became of the answer, before the outbox is emptied: from now on its events are certain."""
        failpoints.hit("device.outcome.before-note")
        self._files.save(
            "outbox/outcome.json",
            json.dumps({"format": FORMAT, **asdict(outcome), "pending": _saved(outcome.pending)}).encode(),
        )
        failpoints.hit("device.outcome.after-note")

    def outcome(self) -> Outcome | None:
        """What is still to be reported to the app, if anything; a damaged file counts as none."""
        return self._outcome("outbox/outcome.json")

    def outcome_reported(self) -> None:
        """The app has had its events. A crash before this repeats them."""
        with disk_errors(self.directory):
            (self._outbox / "outcome.json").replace(self.directory / "last_outcome.json")
            failpoints.hit("device.outcome.after-told")

    def next_attempt(self, number: int, step_number: int) -> int:
        """The number of the next attempt to answer an ask, from 1."""
        last = self._outcome("last_outcome.json")
        same = last is not None and last.pending.name[:2] == (number, step_number)
        return last.pending.attempt + 1 if last is not None and same else 1

    def _outcome(self, name: str) -> Outcome | None:
        data = self._files.load(name)
        if data is None:
            return None
        try:
            found = json_object(self.directory / name, data)
            known = {one.name for one in fields(Outcome)} - {"pending"}
            pending = _pending(self.directory / name, json.dumps(found["pending"]).encode())
            return Outcome(pending, **{key: value for key, value in found.items() if key in known})
        except (StateError, KeyError):
            return None


class _FileSource:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)


def _saved(pending: Pending) -> dict[str, Any]:
    """An answer as the format has it: there the replacement is called `verdict`."""
    replacement = pending.replacement
    values = {**asdict(pending), "replacement": None if replacement is None else replacement.saved()}
    return {_KEYS.get(name, name): value for name, value in values.items()}


def _pending(path: Path, data: bytes) -> Pending:
    found = json_object(path, data)
    check_format(path, found)
    known = {_KEYS.get(one.name, one.name) for one in fields(Pending)}
    if missing := sorted({one.name for one in fields(Pending) if _is_required(one)} - found.keys()):
        raise damaged_error(path, f"it lacks {', '.join(missing)}")
    if unknown := sorted(found.keys() - known - {"format"}):
        raise newer_error(path, f"it has {', '.join(unknown)}")
    try:
        replacement = found.pop("verdict", None)
        found.pop("format", None)
        pending = Pending(**found, replacement=Replacement.restored(replacement) if replacement else None)
        bytes.fromhex(pending.payload)
        return pending
    except (TypeError, ValueError) as error:
        raise damaged_error(path, error) from error


def _is_required(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING
