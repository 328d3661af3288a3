"""Holds what devices were promised against what a run did with it: after a receipt, an upload is in its round's result
or is reported with a reason; never lost, never counted twice.

Three sources are compared, none of which is made from another: the devices' logs (what came over the wire), the store's
tables, and the counting method's own state (what it really had in hand).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos.logged import RECEIPT, SENT, Record

Key = tuple[str, int, int, str]
"""An answer: device, round, step number and digest in hex."""
Asked = tuple[str, int, int]
"""An ask: device, round and step number."""


@dataclass
class Findings:
    """What the check says.

    Attributes:
        acknowledged: Receipts that devices have seen.
        lost: Each upload that was accepted and is neither used nor reported with a reason, and what is known of it.
        doubled: Each ask of which more than one answer counts, or one answer twice, and how.
        wrong: Everything else that may not be.
    """

    acknowledged: int = 0
    lost: dict[Key, str] = field(default_factory=dict)
    doubled: dict[Asked, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def lose(self, key: Key, text: str) -> None:
        """Notes a lost upload; the first thing that is known of it stays."""
        self.lost.setdefault(key, f"{_words(key)} {text}")

    def double(self, asked: Asked, text: str) -> None:
        """Notes an ask whose answer counts more than once."""
        device, number, step = asked
        self.doubled.setdefault(asked, f"{device}, step {step} of round {number}: {text}")


def check(
    logs: Mapping[str, Sequence[Record]], uploads: Iterable[Mapping[str, Any]], used: Sequence[Key] | None
) -> Findings:
    """Compares the three sources once the run is over.

    Args:
        logs: What each device wrote down.
        uploads: Rows of the store: accepted answers with the names of their asks.
        used: Answers in the method's final state, in order; None for a method that keeps no such list.
    """
    result = Findings()
    rows = [dict(row) for row in uploads]
    receipts = _receipts(logs, {row["receipt"] for row in rows if row.get("quarantined_at")}, result)
    result.acknowledged = len(receipts)
    _check_rows(rows, logs, result)
    _check_fates(rows, receipts, result)
    if used is not None:
        _check_used(rows, used, result)
        _check_states(rows, logs, result)
    return result


def _receipts(logs: Mapping[str, Sequence[Record]], taken_back: Container[str], found: Findings) -> dict[str, Key]:
    """Every receipt that a device has seen, and for which answer; an ask has one, however often it is given.

    Only where the payload behind a receipt was lost on the server, and that was reported, the device is asked again.
    """
    receipts: dict[str, Key] = {}
    by_ask: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    for device, records in logs.items():
        sent = _sent(device, records)
        for record in records:
            if record.what != RECEIPT:
                continue
            key = (device, record.round, record.step, record.sha256)
            if key not in sent:
                found.wrong.append(f"{_words(key)} has a receipt and was never sent")
            if receipts.setdefault(record.receipt, key) != key:
                found.double(key[:3], f"receipt {record.receipt} was given for another answer, too")
            if record.receipt not in taken_back:
                by_ask[key[:3]].add(record.receipt)
    for asked, ids in by_ask.items():
        if len(ids) > 1:
            found.double(asked, f"{len(ids)} receipts were given")
    return receipts


def _sent(device: str, records: Sequence[Record]) -> set[Key]:
    return {(device, record.round, record.step, record.sha256) for record in records if record.what == SENT}


def _check_rows(rows: Sequence[Mapping[str, Any]], logs: Mapping[str, Sequence[Record]], found: Findings) -> None:
    sent = {key for device, records in logs.items() for key in _sent(device, records)}
    for row in rows:
        if _key(row) not in sent:
            found.wrong.append(f"{_words(_key(row))} is in the store and was never sent")
    for asked, count in Counter(_key(row)[:3] for row in rows if not row.get("quarantined_at")).items():
        if count > 1:
            found.double(asked, f"the store has {count} answers")


def _check_fates(rows: Sequence[Mapping[str, Any]], receipts: Mapping[str, Key], found: Findings) -> None:
    """Every receipt leads to a row that says `used`, or `reported` and why; so does every row."""
    by_receipt = {row["receipt"]: row for row in rows}
    for receipt, key in receipts.items():
        row = by_receipt.get(receipt)
        if row is None:
            found.lose(key, f"has receipt {receipt}, which the store does not know")
        elif _key(row) != key:
            found.lose(key, f"has receipt {receipt}, which the store gave to {_words(_key(row))}")
    for row in rows:
        if not (row["status"] == "used" or (row["status"] == "reported" and row["reason"])):
            found.lose(_key(row), f"is {row['status']!r} at the end, with {row['reason'] or 'no reason'}")


def _check_used(rows: Sequence[Mapping[str, Any]], used: Sequence[Key], found: Findings) -> None:
    """What the store calls used is what the method had in hand, once."""
    counted = Counter(used)
    for key, count in counted.items():
        if count > 1:
            found.double(key[:3], f"the answer {key[3][:12]} is used {count} times")
    for asked, count in Counter(key[:3] for key in counted).items():
        if count > 1:
            found.double(asked, f"{count} answers are used")
    places = Counter(key[3] for key in counted)
    for key in counted:
        if places[key[3]] > 1:
            found.double(key[:3], f"the answer {key[3][:12]} is used elsewhere, too")
    _check_both_agree(rows, counted, found)
    known = {_key(row) for row in rows}
    found.wrong += [f"{_words(key)} is used and not in the store" for key in counted if key not in known]


def _check_both_agree(rows: Sequence[Mapping[str, Any]], counted: Container[Key], found: Findings) -> None:
    # An answer that was lost on the server may have come once more, unchanged; then the later row stands.
    by_key = {_key(row): row for row in sorted(rows, key=lambda row: not row.get("quarantined_at"))}
    for key, row in by_key.items():
        if row["status"] == "used" and key not in counted:
            found.lose(key, "is used, says the store; the method never had it")
        if row["status"] != "used" and key in counted:
            found.double(key[:3], f"the answer is {row['status']}, says the store; the method has used it")


def _check_states(rows: Sequence[Mapping[str, Any]], logs: Mapping[str, Sequence[Record]], found: Findings) -> None:
    """An answer's weight is its place among its device's: each was made from the state of the receipt before.

    They stand as their device sent them: the server's time of day may be set back, and an engine that starts again may
    find an answer damaged and ask for it once more when later steps have answers. A damaged answer without a receipt is
    left out: if the device was away, or the deadline over, it is told that the answer was lost, and keeps its state.
    """
    places: dict[str, list[int]] = defaultdict(list)
    weights = {_key(row): row["samples"] for row in rows}
    damaged = {_key(row) for row in rows if row.get("quarantined_at")}
    for device, records in logs.items():
        sent, acknowledged = (
            dict.fromkeys(
                (device, record.round, record.step, record.sha256) for record in records if record.what == what
            )
            for what in (SENT, RECEIPT)
        )
        keys = [key for key in sent if key in acknowledged or key not in damaged]
        places[device] = [weights[key] for key in keys if key in weights]
    for device, counts in places.items():
        if counts != list(range(1, len(counts) + 1)):
            found.wrong.append(f"{device} made its answers from states that do not follow each other: {counts}")


def _key(row: Mapping[str, Any]) -> Key:
    return row["device"], row["round"], row["step_number"], bytes(row["sha256"]).hex()


def _words(key: Key) -> str:
    device, number, step, sha256 = key
    return f"{device}'s answer {sha256[:12]} to step {step} of round {number}"
