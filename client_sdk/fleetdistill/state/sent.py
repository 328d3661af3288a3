"""What a device has sent about its data: single messages, totals of a month, and both together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ANSWER, CHECK_IN, DECLINE = "answer", "check-in", "decline"
"""Kinds of messages that contain data of the device. All other calls contain only its id, and names of the server's."""


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
