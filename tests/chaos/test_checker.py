"""The checker of chaos runs can fail: on logs made by hand, and on real runs of a server that is broken on purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chaos.checker import Findings, check
from chaos.logged import RECEIPT, SENT, Log, Record, read_log
from chaos.mutations import BROKEN_IDEMPOTENCY, RECEIPT_BEFORE_COMMIT
from chaos.run import is_good, last_line, run_scenario
from chaos.scenario import ENGINE, FRONT, Action, Blow, Scenario, scenario

ONE, OTHER, THIRD = "aa" * 32, "bb" * 32, "cc" * 32
USED = [("d0", 1, 1, ONE)]


def sent(sha256: str = ONE, attempt: int = 1) -> Record:
    return Record(SENT, 1, 1, attempt, sha256)


def receipt(name: str = "r1", sha256: str = ONE, attempt: int = 1) -> Record:
    return Record(RECEIPT, 1, 1, attempt, sha256, name)


def row(name: str = "r1", sha256: str = ONE, status: str = "used", **changes: Any) -> dict[str, Any]:
    key = {"device": "d0", "round": 1, "step_number": 1, "sha256": bytes.fromhex(sha256)}
    changes = {"samples": 1, "received_at": 1.0, **changes}
    return {"receipt": name, "status": status, "reason": None, **key, **changes}


def check_one(records: list[Record], rows: list[dict[str, Any]], used: Any = USED) -> Findings:
    return check({"d0": records}, rows, used)


def test_an_upload_that_is_acknowledged_and_used_once_is_well() -> None:
    result = check_one([sent(), receipt()], [row()])
    assert result == Findings(acknowledged=1)


def test_acknowledged_upload_reported_with_reason_is_accepted() -> None:
    result = check_one([sent(), receipt()], [row(status="reported", reason="round short")], [])
    assert result == Findings(acknowledged=1)


def test_the_same_receipt_for_a_later_attempt_is_well() -> None:
    records = [sent(), receipt(), sent(OTHER, attempt=2), receipt(attempt=2)]
    assert check_one(records, [row()]) == Findings(acknowledged=1)


def test_stored_answer_with_receipt_unseen_by_device_is_accepted() -> None:
    assert check_one([sent()], [row()]) == Findings()


def test_second_receipt_after_reported_payload_loss_is_accepted() -> None:
    first = row("r1", ONE, "reported", reason="the payload was lost on the server", quarantined_at=1.0)
    second = row("r2", OTHER, samples=2, received_at=2.0)
    records = [sent(), receipt(), sent(OTHER, 2), receipt("r2", OTHER, 2)]
    assert check_one(records, [first, second], [("d0", 1, 1, OTHER)]) == Findings(acknowledged=2)


def test_same_answer_again_after_payload_loss_is_accepted() -> None:
    lost = row("r1", ONE, "reported", reason="the payload was lost on the server", quarantined_at=1.0)
    again = row("r2", ONE, received_at=2.0)
    for rows in ([lost, again], [again, lost]):
        assert check_one([sent(), receipt(), receipt("r2")], rows) == Findings(acknowledged=2)
    assert check_one([sent(), receipt()], [lost]).doubled  # reported, and yet used


def test_method_without_own_list_is_checked_by_store_alone() -> None:
    assert check_one([sent(), receipt()], [row()], None) == Findings(acknowledged=1)
    assert check_one([sent(), receipt()], [], None).lost


@pytest.mark.parametrize(
    ("rows", "used"),
    [
        ([], []),  # the store has forgotten it
        ([row(sha256=OTHER)], [("d0", 1, 1, OTHER)]),  # the receipt is for something else
        ([row(status="acknowledged")], []),  # neither used nor reported
        ([row(status="reported")], []),  # reported, nobody knows why
        ([row()], []),  # the store says used, the method never had it
    ],
)
def test_a_lost_upload_is_found(rows: list[dict[str, Any]], used: list[Any]) -> None:
    assert len(check_one([sent(), sent(OTHER), receipt()], rows, used).lost) == 1


@pytest.mark.parametrize(
    ("records", "rows", "used"),
    [
        ([sent(), receipt()], [row()], USED * 2),  # counted twice by the method
        ([sent(), receipt(), receipt("r2")], [row()], USED),  # two receipts for one ask
        ([sent(), receipt()], [row(), row("r2")], USED),  # two answers to one ask
        ([sent(), receipt()], [row(status="reported", reason="late")], USED),  # reported, and yet used
        ([sent(), sent(OTHER), receipt(), receipt(sha256=OTHER)], [row()], USED),  # one receipt for two answers
        ([sent(), sent(OTHER)], [row(), row("r2", OTHER)], [*USED, ("d0", 1, 1, OTHER)]),  # two used for one ask
    ],
)
def test_a_doubled_upload_is_found(records: list[Record], rows: list[dict[str, Any]], used: list[Any]) -> None:
    assert check_one(records, rows, used).doubled


def test_an_answer_used_in_two_places_is_found() -> None:
    used = [*USED, ("d1", 1, 1, ONE)]
    logs = {"d0": [sent(), receipt()], "d1": [sent()]}
    assert check(logs, [row(), row("r2", device="d1")], used).doubled


def test_an_answer_that_nobody_sent_is_found() -> None:
    assert check_one([], [row()]).wrong
    assert check_one([receipt()], [row()]).wrong
    assert check_one([sent()], [], USED).wrong


def test_answer_from_state_that_is_old_or_lacks_receipt_is_found() -> None:
    records = [sent(), receipt(), Record(SENT, 2, 1, 1, OTHER), Record(RECEIPT, 2, 1, 1, OTHER, "r2")]
    used = [*USED, ("d0", 2, 1, OTHER)]
    for place in (1, 3):
        second = row("r2", OTHER, round=2, samples=place, received_at=2.0)
        assert check_one(records, [row(), second], used).wrong
    assert check_one(records, [row(), {**second, "samples": 2}], used) == Findings(acknowledged=2)


def test_an_answer_asked_for_again_after_a_later_step_is_well() -> None:
    """A damaged answer to step 1 is found by an engine that starts again when step 2 has its answer."""
    records = [sent(), receipt(), replace(sent(OTHER), step=2), replace(receipt("r2", OTHER), step=2)]
    records += [sent(THIRD, attempt=2), receipt("r3", THIRD, attempt=2)]
    lost = row(status="reported", reason="lost", quarantined_at=1.0)
    rows = [lost, row("r2", OTHER, step_number=2, samples=2), row("r3", THIRD, attempt=2, samples=3)]
    result = check_one(records, rows, [("d0", 1, 2, OTHER), ("d0", 1, 1, THIRD)])
    assert (result.lost, result.doubled, result.wrong) == ({}, {}, [])


def test_damaged_answer_without_receipt_does_not_advance_device() -> None:
    """Seeds 471 and 503 of length 10: the device was away when the engine found its answer damaged."""
    records = [sent(), replace(sent(OTHER), round=2), replace(receipt("r2", OTHER), round=2)]
    lost = row(status="reported", reason="lost", quarantined_at=1.0)
    rows = [lost, row("r2", OTHER, round=2, samples=1)]
    result = check_one(records, rows, [("d0", 2, 1, OTHER)])
    assert (result.lost, result.doubled, result.wrong) == ({}, {}, [])
    with_receipt = check_one([sent(), receipt(), *records[1:]], rows, [("d0", 2, 1, OTHER)])
    assert with_receipt.wrong == ["d0 made its answers from states that do not follow each other: [1, 1]"]


def test_log_of_device_killed_within_a_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "d0.jsonl"
    Log(path).add(sent())
    with path.open("ab") as file:
        file.write(b'{"what": "rece')
    Log(path).add(receipt())
    assert read_log(path) == [sent(), receipt()]


def struck(seed: int, *targets: str) -> Scenario:
    """A counting run whose processes are killed again and again, with every upload sent twice; no other trouble."""
    blows = tuple(Blow(4 + 6 * number, 0.0, Action.KILL, targets[number % len(targets)], 0.0) for number in range(4))
    terms: dict[str, Any] = {
        "rounds": 3,
        "steps": 2,
        "deadline_seconds": 4.0,
        "quorum": 0.3,
        "twice": 1.0,
        "faulty": 0.0,
    }
    wanted = scenario(seed)
    return replace(wanted, **terms, devices=wanted.devices[:6], blows=blows, failpoints={})


def findings_of(wanted: Scenario, tmp_path: Path, mutation: str) -> dict[str, Any]:
    """Of the first of three seeds that finds anything lost or doubled."""
    result: dict[str, Any] = {}
    for seed in range(1, 4):
        result = run_scenario(replace(wanted, seed=seed), tmp_path / str(seed), mutation)
        if result["lost"] or result["doubled"]:
            break
    return result


@pytest.mark.long
@pytest.mark.slow
def test_a_receipt_before_the_commit_is_found(tmp_path: Path) -> None:
    result = findings_of(struck(1, FRONT), tmp_path, RECEIPT_BEFORE_COMMIT)
    assert any("which the store does not know" in text for text in result["lost"])


@pytest.mark.long
@pytest.mark.slow
def test_an_upload_that_counts_again_is_found(tmp_path: Path) -> None:
    result = findings_of(struck(1, ENGINE), tmp_path, BROKEN_IDEMPOTENCY)
    assert any("receipts were given" in text for text in result["doubled"])


@pytest.mark.long
@pytest.mark.slow
def test_whole_server_under_faults_loses_and_doubles_nothing(tmp_path: Path) -> None:
    result = run_scenario(struck(1, FRONT, ENGINE), tmp_path / "1", "")
    assert is_good(result), result
    acknowledged, kills = result["acknowledged"], result["kills"]
    assert acknowledged > 0 < kills
    assert last_line([result]) == f"chaos: {acknowledged} acknowledged, 0 lost, 0 doubled, {kills} kills"
