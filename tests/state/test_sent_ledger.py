"""The ledger of what a device has sent: complete, bounded, and readable whatever happens to its file."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetdistill.device.inspection import inspect
from fleetdistill.state import failpoints
from fleetdistill.state.files import Files
from fleetdistill.state.sent_ledger import (
    KEPT_ENTRIES,
    LEDGER,
    MAX_ENTRIES,
    Ledger,
    Sent,
    SentLedger,
    compact,
    read_ledger,
)

NOVEMBER = time.mktime((2026, 11, 15, 12, 0, 0, 0, 0, 0))


def answer(number: int = 1, at: float = NOVEMBER, size: int = 100) -> Sent:
    columns = {"knowledge": ["features", "logits"]}
    return Sent(kind="answer", time=at, bytes=size, run="r", round=number, step="train", step_number=1, attempt=1,
                samples=4, columns=columns, sha256="ab" * 32)  # fmt: skip


def ledger_of(directory: Path) -> Ledger:
    return read_ledger((directory / LEDGER).read_bytes())


def test_an_answer_is_recorded_before_and_its_receipt_after(tmp_path: Path) -> None:
    ledger = SentLedger(Files(tmp_path))
    ledger.begin_answer(answer())
    assert [entry.outcome for entry in ledger_of(tmp_path).entries] == ["may have been sent"]
    ledger.end_answer("r", (1, 1, 1), receipt="cafe")
    (result,) = ledger_of(tmp_path).entries
    assert (result.receipt, result.outcome, result.columns) == (
        "cafe",
        "received",
        {"knowledge": ["features", "logits"]},
    )


def test_retries_and_repeated_receipts_add_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        ledger = SentLedger(Files(tmp_path))
        for _ in range(2):
            ledger.begin_answer(answer())
        ledger.end_answer("r", (1, 1, 1), code="late")
        ledger.end_answer("r", (1, 1, 1), receipt="cafe")
    (result,) = ledger_of(tmp_path).entries
    assert (result.outcome, result.code) == ("refused", "late")
    assert len((tmp_path / LEDGER).read_bytes().splitlines()) == 2


def test_an_outcome_of_an_answer_that_never_left_is_not_recorded(tmp_path: Path) -> None:
    SentLedger(Files(tmp_path)).end_answer("r", (1, 1, 1), code="late")
    assert not (tmp_path / LEDGER).exists()


def test_lines_are_only_appended(tmp_path: Path) -> None:
    ledger, before = SentLedger(Files(tmp_path)), b""
    for number in range(1, 6):
        ledger.begin_answer(answer(number))
        ledger.end_answer("r", (number, 1, 1), receipt=f"{number:x}")
        now = (tmp_path / LEDGER).read_bytes()
        assert now.startswith(before)
        before = now


def test_the_file_is_private_to_its_owner(tmp_path: Path) -> None:
    SentLedger(Files(tmp_path)).record(answer())
    assert (tmp_path / LEDGER).stat().st_mode & 0o777 == 0o600


def test_old_entries_become_monthly_totals_and_nothing_is_lost(tmp_path: Path) -> None:
    month = 30 * 86400
    entries = [answer(number, NOVEMBER + number * month / 500, size=number) for number in range(1, MAX_ENTRIES)]
    lines = SentLedger(Files(tmp_path))
    full = Ledger(entries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failpoints, "hit", lambda name: None)
        (tmp_path / LEDGER).write_bytes(b"".join(sealed(entry) for entry in entries))
        lines.record(answer(MAX_ENTRIES, NOVEMBER + 5 * month, size=7))
    result = ledger_of(tmp_path)
    assert len(result.entries) == KEPT_ENTRIES
    assert result.entries[-1].round == MAX_ENTRIES
    assert [month.month for month in result.months] == ["2026-11", "2026-12", "2027-01"]
    assert result.totals.bytes == full.totals.bytes + 7
    assert result.totals.messages == {"answer": MAX_ENTRIES}
    assert result.totals.columns == ["features", "logits"]


def sealed(entry: Sent) -> bytes:
    """A line as the ledger itself writes it."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        SentLedger(Files(Path(folder))).record(entry)
        return (Path(folder) / LEDGER).read_bytes()


@given(st.lists(st.integers(0, 50 * 365 * 86400), max_size=60), st.integers(0, 20), st.integers(1, 12))
def test_compaction_keeps_totals_and_bounds(times: list[int], entries: int, months: int) -> None:
    """Whatever the clock of the device did: a clock that jumps cannot make the file grow."""
    full = Ledger([answer(number, at, size=number) for number, at in enumerate(times)])
    result = compact(full, entries, months)
    assert result.totals == full.totals
    assert len(result.entries) <= entries
    assert len(result.months) <= months


def test_months_beyond_the_limit_count_for_the_oldest_one_kept() -> None:
    month = 31 * 86400
    full = Ledger([answer(number, NOVEMBER + number * month, size=10**number) for number in range(3)])
    result = compact(full, entries=0, months=2)
    assert [(month.month, month.bytes) for month in result.months] == [("2026-12", 11), ("2027-01", 100)]


def test_a_round_with_two_receipts_is_one_round(tmp_path: Path) -> None:
    ledger = SentLedger(Files(tmp_path))
    for entry in (answer(1), replace(answer(1), step_number=2), answer(2), answer(3)):
        ledger.begin_answer(entry)
    for name in ((1, 1, 1), (1, 2, 1), (2, 1, 1)):
        ledger.end_answer("r", name, receipt="cafe")
    result = inspect(tmp_path)
    assert (result.rounds, result.ledger.totals.receipts) == (2, 3)


# --- damage


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("ledger")
    ledger = SentLedger(Files(directory))
    for number in (1, 2, 3):
        ledger.begin_answer(answer(number))
    ledger.end_answer("r", (2, 1, 1), receipt="cafe")
    return (directory / LEDGER).read_bytes()


@settings(deadline=None)
@given(data=st.data())
def test_changed_bit_or_cut_is_reported_and_other_lines_are_kept(
    three: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("damaged")
    at = data.draw(st.integers(0, len(three) - 1))
    if data.draw(st.booleans()):
        damaged = three[:at]
    else:
        damaged = three[:at] + bytes([three[at] ^ 1 << data.draw(st.integers(0, 7))]) + three[at + 1 :]
    (directory / LEDGER).write_bytes(damaged)
    files = Files(directory)
    SentLedger(files).begin_answer(answer(4))
    result, before = ledger_of(directory), read_ledger(three)
    assert result.damaged == 0
    assert result.entries[-1] == answer(4)
    whole = result.entries[:-1] == before.entries
    cut_between_lines = damaged == three[: len(damaged)] and damaged.endswith(b"\n")
    assert whole or files.put_aside or cut_between_lines or not damaged
    for item in files.put_aside:
        assert item.kept_as.read_bytes() == damaged
    assert all(entry in (*before.entries, answer(2)) for entry in result.entries[:-1])


def test_damaged_lines_are_counted_for_a_reader(three: bytes) -> None:
    lines = three.splitlines(keepends=True)
    assert read_ledger(lines[0] + lines[1][:-9] + b"\n" + lines[2]).damaged == 1


def test_a_line_that_is_valid_json_but_not_of_a_ledger_is_damage() -> None:
    assert read_ledger(b"[]\n3\nnull\n" + json.dumps({"crc": 1}).encode()).damaged == 4
