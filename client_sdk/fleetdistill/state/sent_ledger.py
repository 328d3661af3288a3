"""The ledger of a state directory: a durable record of everything that the device has sent about its data.

    ledger.jsonl    one JSON object per line, each with the CRC-32C of its other members as `crc`

An entry is written and fsynced before the bytes leave; the server's receipt or refusal is appended as a second line. An
answer without either may have been sent. Lines are only appended, up to `MAX_ENTRIES`. Then a file with the newest
`KEPT_ENTRIES` replaces this one; the others become totals of their months, of which `MAX_MONTHS` are kept.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import google_crc32c

from fleetdistill.state import failpoints
from fleetdistill.state.disk import disk_errors
from fleetdistill.state.durable import sync_file
from fleetdistill.state.files import Files
from fleetdistill.state.outbox import Pending
from fleetdistill.wire.codec import Payload

ANSWER, CHECK_IN, DECLINE = "answer", "check-in", "decline"
"""Kinds of messages that contain data of the device. All other calls contain only its id, and names of the server's."""
LEDGER = "ledger.jsonl"
MAX_ENTRIES, KEPT_ENTRIES = 2000, 1000
MAX_MONTHS = 240
_OUTCOME, _MONTH = "outcome", "month"
_CHECK_IN_NAME = (0, 0, 0)
"""What outcomes name a check-in by; rounds begin with 1."""


class SentLedger:
    """Appends to the ledger of one state directory. Thread-safe.

    Args:
        files: The state directory.
    """

    def __init__(self, files: Files) -> None:
        self._files, self._path = files, files.directory / LEDGER
        self._lock = threading.Lock()
        self._loaded: Ledger | None = None

    def begin_answer(self, entry: Sent) -> None:
        """Records an answer durably before it is sent; a repeated attempt to send it is not recorded again."""
        with self._lock:
            if not any(one.kind == ANSWER and _same(one, entry) for one in self._ledger().entries):
                self._append(entry)
                failpoints.hit("device.ledger.after-answer")

    def end_answer(self, run: str, name: tuple[int, int, int], *, receipt: str = "", code: str = "") -> None:
        """Records the receipt or the refusal of an answer; does nothing if it is recorded, or nothing was sent."""
        with self._lock:
            entries = self._ledger().entries
            if not any(
                entry.kind == ANSWER and (entry.run, entry.name) == (run, name) and _open(entry) for entry in entries
            ):
                return
            self._write({"kind": _OUTCOME, "run": run, "name": list(name), "receipt": receipt, "code": code})
            failpoints.hit("device.ledger.after-outcome")

    def begin_check_in(self, entry: Sent) -> None:
        """Records a check-in durably before it is sent; a repeated attempt without a reply is not recorded again."""
        with self._lock:
            last = next((entry for entry in reversed(self._ledger().entries) if entry.kind == CHECK_IN), None)
            if last is None or last.replied or replace(entry, time=last.time) != last:
                self._append(entry)

    def end_check_in(self, run: str) -> None:
        """Records that the server replied to the last check-in."""
        with self._lock:
            self._write({"kind": _OUTCOME, "run": run, "name": list(_CHECK_IN_NAME), "receipt": "", "code": ""})

    def record(self, entry: Sent) -> None:
        """Records a decline durably before it is sent."""
        with self._lock:
            self._append(entry)

    def _append(self, entry: Sent) -> None:
        self._write(_line(entry))
        if len(self._ledger().entries) >= MAX_ENTRIES:
            self._loaded = compact(self._ledger(), KEPT_ENTRIES, MAX_MONTHS)
            self._files.save(LEDGER, _content(self._loaded), mode=0o600)

    def _write(self, line: Mapping[str, Any]) -> None:
        """Appends a line durably."""
        ledger, data = self._ledger(), _seal(line)
        self._loaded = None  # after an error, the file decides
        if not self._path.exists():
            self._files.save(LEDGER, data, mode=0o600)
        else:
            with disk_errors(self._files.directory), self._path.open("ab") as file:
                file.write(data)
                sync_file(file)
        reader = _Reader(list(ledger.entries), list(ledger.months))
        reader.take(data)
        self._loaded = reader.ledger

    def _ledger(self) -> Ledger:
        """Returns the ledger; a damaged file is first put aside and replaced by its readable lines."""
        if self._loaded is None:
            data = self._files.load(LEDGER) or b""
            ledger = read_ledger(data)
            if ledger.damaged or (data and not data.endswith(b"\n")):
                self._files.set_aside(LEDGER, f"{ledger.damaged} unreadable lines", "the others are kept", copy=True)
                self._files.save(LEDGER, _content(ledger), mode=0o600)
            self._loaded = replace(ledger, damaged=0)
        return self._loaded


def answer_entry(run: str, pending: Pending, payload: Payload) -> Sent:
    """Returns the entry of an answer."""
    return Sent(
        kind=ANSWER,
        time=time.time(),
        run=run,
        bytes=payload.header().ByteSize() + payload.data_bytes,
        round=pending.round,
        step=pending.step,
        step_number=pending.step_number,
        attempt=pending.attempt,
        samples=pending.samples,
        columns={name: list(part) for name, part in pending.columns.items()},
        sha256=payload.digest.hex(),
    )


def check_in_entry(run: str, samples: int, size: int) -> Sent:
    """Returns the entry of a check-in."""
    return Sent(kind=CHECK_IN, time=time.time(), run=run, bytes=size, samples=samples)


def decline_entry(run: str, round: int, step: str, step_number: int, text: str) -> Sent:
    """Returns the entry of a decline."""
    size = len(text.encode())
    return Sent(
        kind=DECLINE, time=time.time(), run=run, bytes=size, round=round, step=step, step_number=step_number, text=text
    )


def read_ledger(data: bytes) -> Ledger:
    """Returns the ledger in a file. Unreadable lines, such as one that a power cut truncated, are counted."""
    reader = _Reader()
    for line in data.split(b"\n"):
        if line:
            reader.take(line)
    return reader.ledger


@dataclass
class _Reader:
    entries: list[Sent] = field(default_factory=list)
    months: list[SentTotals] = field(default_factory=list)
    damaged: int = 0

    def take(self, line: bytes) -> None:
        """Adds a line."""
        result = _unseal(line)
        if result is None or not self._add(result):
            self.damaged += 1

    def _add(self, found: dict[str, Any]) -> bool:
        """Adds the content of a line; returns False if it is not a line of a ledger."""
        try:
            if found["kind"] == _OUTCOME:
                self._end(found["run"], tuple(found["name"]), found["receipt"], found["code"])
            elif found["kind"] == _MONTH:
                self.months.append(SentTotals(**found["totals"]))
            else:
                self.entries.append(Sent(**found))
        except (KeyError, TypeError):
            return False
        return True

    def _end(self, run: str, name: tuple[int, ...], receipt: str, code: str) -> None:
        for at in reversed(range(len(self.entries))):
            one = self.entries[at]
            if one.kind != DECLINE and (one.run, one.name) == (run, name):
                self.entries[at] = replace(one, receipt=receipt, code=code, replied=one.kind == CHECK_IN)
                return

    @property
    def ledger(self) -> Ledger:
        return Ledger(tuple(self.entries), tuple(self.months), self.damaged)


def _same(one: Sent, other: Sent) -> bool:
    return (one.run, one.name, one.sha256) == (other.run, other.name, other.sha256)


def _open(one: Sent) -> bool:
    return not one.receipt and not one.code


def _line(entry: Sent) -> dict[str, Any]:
    """Returns the members of an entry's line, without those that are empty."""
    given = {name: value for name, value in asdict(entry).items() if value}
    return {**given, "time": entry.time, "bytes": entry.bytes}


def _content(ledger: Ledger) -> bytes:
    """Returns the content of a file with a ledger's months and entries."""
    months: Iterable[dict[str, Any]] = ({"kind": _MONTH, "totals": asdict(month)} for month in ledger.months)
    return b"".join(_seal(line) for line in (*months, *map(_line, ledger.entries)))


def _seal(line: Mapping[str, Any]) -> bytes:
    """Returns a line with its checksum."""
    text = json.dumps(line)
    return json.dumps({**line, "crc": google_crc32c.value(text.encode())}).encode() + b"\n"


def _unseal(line: bytes) -> dict[str, Any] | None:
    """Returns the members of a line; None if it is incomplete or does not match its checksum."""
    try:
        result = json.loads(line)
        crc = result.pop("crc")
    except (ValueError, AttributeError, KeyError, TypeError):
        return None
    return result if google_crc32c.value(json.dumps(result).encode()) == crc else None


# --- What a device has sent about its data: single messages, totals of a month, and both together.


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One message that a device has sent, or may have sent.

    Attributes:
        kind: `answer`, `check-in` or `decline`.
        time: When the device was about to send it, in Unix seconds; for a check-in that was tried again, first.
        bytes: Size of the message, uncompressed.
        run: Name of the run.
        round, step, step_number, attempt: The ask, and the attempt to answer it; 0 and empty for a check-in.
        samples: Number of samples that the message declares.
        columns: Columns of each part of an answer, by name of the part.
        sha256: Digest of an answer's payload in hexadecimal: SHA-256, or BLAKE3 if device and server have it.
        receipt: Id of the server's receipt; empty without one.
        code: Code of the server's refusal; empty without one.
        text: Reason of a decline.
        replied: Of a check-in, whether the server replied to it.
    """

    kind: str
    time: float
    bytes: int
    run: str = ""
    round: int = 0
    step: str = ""
    step_number: int = 0
    attempt: int = 0
    samples: int = 0
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sha256: str = ""
    receipt: str = ""
    code: str = ""
    text: str = ""
    replied: bool = False

    @property
    def outcome(self) -> str:
        """`received`, `refused`, or `may have been sent` for an answer without either.

        `sent` for a decline, and for a check-in to which the server replied; else `may have been sent`.
        """
        if self.kind != ANSWER:
            return "sent" if self.kind == DECLINE or self.replied else "may have been sent"
        return "received" if self.receipt else "refused" if self.code else "may have been sent"

    @property
    def name(self) -> tuple[int, int, int]:
        """Round, step number and attempt."""
        return self.round, self.step_number, self.attempt

    @property
    def totals(self) -> SentTotals:
        """Totals of this message alone."""
        return SentTotals(
            month=time.strftime("%Y-%m", time.gmtime(self.time)),
            messages={self.kind: 1},
            receipts=int(bool(self.receipt)),
            bytes=self.bytes,
            columns=sorted({column for part in self.columns.values() for column in part}),
        )


@dataclass(frozen=True, kw_only=True)
class SentTotals:
    """Totals of messages that a device has sent or may have sent.

    Attributes:
        month: Month in UTC, such as `2026-11`; empty for all months together.
        messages: Number of messages by kind.
        receipts: Number of answers with a receipt.
        bytes: Size of all messages, uncompressed.
        columns: All columns that answers contained, sorted.
    """

    month: str = ""
    messages: Mapping[str, int] = field(default_factory=dict)
    receipts: int = 0
    bytes: int = 0
    columns: Sequence[str] = ()

    def plus(self, other: SentTotals) -> SentTotals:
        """Returns the sum of both; the month is that of this object."""
        kinds = sorted({*self.messages, *other.messages})
        return SentTotals(
            month=self.month,
            messages={kind: self.messages.get(kind, 0) + other.messages.get(kind, 0) for kind in kinds},
            receipts=self.receipts + other.receipts,
            bytes=self.bytes + other.bytes,
            columns=sorted({*self.columns, *other.columns}),
        )


@dataclass(frozen=True)
class Ledger:
    """A copy of a device's ledger, from `Device.ledger` or `inspect`.

    Attributes:
        entries: Newest messages, oldest first.
        months: Totals of all earlier messages by month, oldest first.
        damaged: Number of lines of the file that cannot be read and are not included.
    """

    entries: Sequence[Sent] = ()
    months: Sequence[SentTotals] = ()
    damaged: int = 0

    @property
    def totals(self) -> SentTotals:
        """Totals of all messages, those of earlier months included."""
        result = SentTotals()
        for item in (*self.months, *(entry.totals for entry in self.entries)):
            result = result.plus(item)
        return result


def compact(ledger: Ledger, entries: int, months: int) -> Ledger:
    """Returns a ledger with only the newest entries; older ones are in the totals of their months.

    Args:
        ledger: The ledger.
        entries: Number of entries to keep.
        months: Number of monthly totals to keep; the totals of older months are added to the oldest one kept.
    """
    by_month = {month.month: month for month in ledger.months}
    first = max(len(ledger.entries) - entries, 0)
    for entry in ledger.entries[:first]:
        one = entry.totals
        by_month[one.month] = by_month[one.month].plus(one) if one.month in by_month else one
    ordered = [by_month[month] for month in sorted(by_month)]
    while len(ordered) > months:
        ordered[:2] = [ordered[1].plus(ordered[0])]
    return Ledger(ledger.entries[first:], ordered, ledger.damaged)
