"""What every store must do, on files, in memory and in PostgreSQL alike."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores import IN_POSTGRES, place_store
from support.wire_samples import make_metrics

from fleetdistill.errors import RunError, StoreError
from fleetdistill.knowledge import ClassCount, Metric, Metrics
from fleetdistill_server.security.revocation import revoke_device
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.records import AnswerCounts, Ask, Certificate, Run, Upload
from fleetdistill_server.store.sqlite_database import SqliteDatabase
from fleetdistill_server.store.states import STALENESS, TRANSITIONS, RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.sums import EVERY
from fleetdistill_server.store.traffic import Counted

RUN = "digits"
CONFIG = {"run": {"name": RUN, "rounds": 3}, "method": {"refinement": "skr"}}


@pytest.fixture(params=["files", "memory", IN_POSTGRES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = Store.in_memory() if request.param == "memory" else Store.open(place_store(request, tmp_path / "store"))
    opened.runs.begin(RUN, CONFIG)
    yield opened
    opened.close()


def ask_row(device: str, step_number: int = 1, number: int = 1, **changes: Any) -> Row:
    row: Row = {
        "run": RUN,
        "round": number,
        "step_number": step_number,
        "device": device,
        "step": "train",
        "expects": {"knowledge": "sample_knowledge"},
        "payload": b"p" * 32,
        "payload_bytes": 100,
        "seed": 2**63 - 1,
        "deadline_at": time.time() + 600,
    }
    return {**row, **changes}


def ask_devices(store: Store, *devices: str, **changes: Any) -> list[int]:
    """Writes an ask for each device; returns their ids."""
    store.asks.add([Ask(**ask_row(device, **changes)) for device in devices])
    number, step = changes.get("number", 1), changes.get("step_number", 1)
    return [ask.id for ask in store.asks.of_step(RUN, number, step) if ask.device in devices]


def next_open(store: Store) -> int | None:
    ask = store.asks.next_open(RUN, "a")
    return None if ask is None else ask.id


def accept(store: Store, ask: int, attempt: int = 1) -> Upload | None:
    accepted = store.asks.accept_upload(ask, attempt, bytes([attempt]) * 32, 1000, 12)
    return None if accepted is None else accepted.upload


def upload_states(store: Store) -> dict[str, tuple[str, str | None]]:
    return {row.device: (row.status, row.reason) for row in store.asks.uploads(RUN)}


def run_row(store: Store) -> Run:
    return store.runs.existing(RUN)


# --- runs


def test_a_new_run_is_preparing_and_an_unknown_one_is_none(store: Store) -> None:
    row = run_row(store)
    assert (row.status, row.contract, row.checkpoint, row.completed_rounds) == ("preparing", b"", b"", 0)
    assert row.config == CONFIG
    assert store.runs.get("other") is None


def test_a_run_is_found_again_with_its_progress(store: Store) -> None:
    store.runs.start_round(RUN, ["a"])
    store.runs.begin(RUN, {"method": {"refinement": "skr"}, "run": {"rounds": 3, "name": RUN}})  # order does not matter
    assert run_row(store).next_round == 2
    assert len(store.runs.all()) == 1


def test_run_with_changed_configuration_is_refused_with_changes(store: Store) -> None:
    changed = {"run": {"name": RUN, "rounds": 5, "seed": 1}, "method": {}}
    with pytest.raises(RunError) as error:
        store.runs.begin(RUN, changed)
    assert str(error.value) == (
        "run 'digits' exists with another configuration: method.refinement was 'skr', is None; "
        "run.rounds was 3, is 5; run.seed was None, is 1; "
        "put the old values back, or give the changed run a new name"
    )
    assert run_row(store).config == CONFIG


def test_runs_are_listed_oldest_first_with_devices(store: Store) -> None:
    store.runs.begin("another", {})
    store.devices.register(RUN, "a", b"h", b"")
    assert [run.name for run in store.runs.all()] == [RUN, "another"]
    assert store.devices.count(RUN) == 1


def test_a_contract_opens_the_run(store: Store) -> None:
    store.runs.publish_contract(RUN, b"terms\0of the run")
    assert (run_row(store).contract, run_row(store).status) == (b"terms\0of the run", "running")


def test_a_run_ends_with_its_reason_and_can_be_opened_again(store: Store) -> None:
    store.runs.set_status(RUN, RunStatus.STOPPED, "by the operator")
    assert (run_row(store).status, run_row(store).reason) == ("stopped", "by the operator")
    store.runs.set_status(RUN, RunStatus.RUNNING, "started again")
    assert run_row(store).status == "running"


def test_only_the_last_engine_owns_a_run(store: Store) -> None:
    first = store.runs.own(RUN)
    store.runs.assert_owner(RUN, first)
    second = store.runs.own(RUN)
    store.runs.assert_owner(RUN, second)
    with pytest.raises(RunError, match="run 'digits' was taken over by another engine"):
        store.runs.assert_owner(RUN, first)


def test_an_engine_that_lost_its_run_writes_nothing(store: Store) -> None:
    token = store.runs.own(RUN)
    store.runs.own(RUN)

    def write() -> None:
        with store.transaction():
            store.runs.start_round(RUN, ["a"])
            store.runs.assert_owner(RUN, token)

    with pytest.raises(RunError):
        write()
    assert (store.runs.open_round(RUN), run_row(store).next_round) == (None, 1)


# --- devices


def test_only_present_devices_are_listed_in_bytewise_order(store: Store) -> None:
    for device in ("é", "b", "a2", "B", "a10"):
        assert store.devices.register(RUN, device, b"hash", b"profile")
    store.devices.mark_absent(RUN, "b", "device left")
    assert store.devices.present(RUN) == ["B", "a10", "a2", "é"]
    assert [row.id for row in store.devices.all(RUN)] == ["B", "a10", "a2", "b", "é"]
    assert store.devices.present("other") == []


def test_devices_entered_together_are_as_if_checked_in(store: Store) -> None:
    assert store.devices.register(RUN, "a", b"first", b"profile")
    store.devices.register_new(RUN, [("b", b"second", b"other"), ("c", b"third", b"profile")])
    assert store.devices.ids(RUN) == {"a", "b", "c"}
    assert store.devices.ids("other") == set()
    rows = {row.id: row for row in store.devices.all(RUN)}
    assert (rows["b"].secret_hash, rows["b"].profile, rows["b"].is_present) == (b"second", b"other", True)
    assert rows["b"].first_seen == rows["b"].last_seen == rows["c"].first_seen > 0
    assert store.devices.present(RUN) == ["a", "b", "c"]
    assert not store.devices.register(RUN, "b", b"stolen", b"profile")
    assert store.devices.register(RUN, "b", b"second", b"later")
    store.devices.register_new(RUN, [])
    assert store.devices.ids(RUN) == {"a", "b", "c"}


def test_a_device_keeps_the_secret_of_its_first_check_in(store: Store) -> None:
    assert store.devices.register(RUN, "a", b"first", b"old profile")
    assert not store.devices.register(RUN, "a", b"second", b"stolen")
    row = store.devices.get(RUN, "a")
    assert row is not None
    assert (row.secret_hash, row.profile) == (b"first", b"old profile")
    assert store.devices.register(RUN, "a", b"first", b"new profile")
    again = store.devices.get(RUN, "a")
    assert again is not None
    assert (again.profile, again.first_seen) == (b"new profile", row.first_seen)
    assert store.devices.get(RUN, "b") is None


def test_departed_device_leaves_open_asks_and_keeps_its_answers(store: Store) -> None:
    store.devices.register(RUN, "a", b"hash", b"")
    (done,) = ask_devices(store, "a")
    accept(store, done)
    ask_devices(store, "a", "b", step_number=2)
    store.devices.mark_absent(RUN, "a", "lease ended")
    asks = [(item.device, item.status, item.reason) for item in store.asks.of_step(RUN, 1, 2)]
    assert asks == [("a", "out", "lease ended"), ("b", "open", "")]
    assert store.asks.of_step(RUN, 1, 1)[0].status == "answered"
    assert store.devices.present(RUN) == []


def test_a_device_that_calls_again_is_back(store: Store) -> None:
    store.devices.register(RUN, "a", b"hash", b"")
    store.devices.mark_absent(RUN, "a", "lease ended")
    store.devices.mark_present(RUN, "a")
    assert store.devices.present(RUN) == ["a"]


def test_a_revoked_device_never_comes_back(store: Store) -> None:
    """Whatever call of it was under way when it was revoked."""
    for device in ("a", "b"):
        store.devices.register(RUN, device, b"hash", b"old")
    revoke_device(store, "a", "stolen")
    store.devices.mark_present(RUN, "a")
    assert store.devices.register(RUN, "a", b"hash", b"new")
    assert store.devices.present(RUN) == ["b"]
    store.credentials.revoke("device:c", "never came")
    assert store.devices.register(RUN, "c", b"hash", b"")
    assert store.devices.present(RUN) == ["b"]


def test_who_has_gone_is_asked_nothing(store: Store) -> None:
    for device in ("a", "b", "c"):
        store.devices.register(RUN, device, b"hash", b"")
    store.devices.mark_absent(RUN, "a", "device left")
    revoke_device(store, "b", "stolen")
    ask_devices(store, "a", "b", "c", "unknown")
    asks = {item.device: (item.status, item.reason) for item in store.asks.of_step(RUN, 1, 1)}
    assert asks.pop("a") == ("out", "device not present")
    assert asks.pop("b") == ("out", "device revoked")
    assert asks == dict.fromkeys(("c", "unknown"), ("open", ""))
    store.devices.mark_present(RUN, "a")
    ask_devices(store, "a")
    assert store.asks.next_open(RUN, "a") is None, "an ask that is there is left as it is"


# --- rounds


def test_rounds_are_counted_from_one_short_ones_included(store: Store) -> None:
    assert store.runs.open_round(RUN) is None
    assert store.runs.start_round(RUN, ["b", "a"]) == 1
    opened = store.runs.open_round(RUN)
    assert opened is not None
    assert (opened.number, opened.cohort) == (1, ["b", "a"])
    store.runs.close_short_round(RUN, 1, "too few answered")
    assert store.runs.open_round(RUN) is None
    assert store.runs.start_round(RUN, []) == 2
    store.runs.close_round(RUN, 2, b"c" * 32, [], {"loss": 0.5})
    assert store.runs.start_round(RUN, []) == 3
    states = [(row.number, row.status, row.reason) for row in store.runs.rounds(RUN)]
    assert states == [(1, "short", "too few answered"), (2, "closed", ""), (3, "open", "")]
    assert run_row(store).completed_rounds == 1


def test_a_closed_round_marks_every_upload_used_or_reported(store: Store) -> None:
    number = store.runs.start_round(RUN, ["a", "b", "c"])
    used, unused, _open = ask_devices(store, "a", "b", "c")
    accept(store, used)
    accept(store, unused)
    store.runs.close_round(RUN, number, b"c" * 32, [used], {"accuracy": 0.5})
    assert upload_states(store) == {"a": ("used", ""), "b": ("reported", "the round ended without using the answer")}
    ((row, answers),) = store.summaries.rounds(RUN, 0, EVERY)
    assert (answers, row.figures) == (AnswerCounts(1, 1, 2), {"accuracy": 0.5})
    assert (run_row(store).checkpoint, run_row(store).completed_rounds) == (b"c" * 32, 1)
    assert [ask.reason for ask in store.asks.of_step(RUN, number, 1)] == ["", "", "round closed"]
    assert store.asks.next_open(RUN, "c") is None


def test_a_short_round_reports_its_uploads_and_costs_nothing(store: Store) -> None:
    store.runs.set_checkpoint(RUN, b"before" + b"0" * 26)
    number = store.runs.start_round(RUN, ["a", "b"])
    accept(store, ask_devices(store, "a", "b")[0])
    store.runs.close_short_round(RUN, number, "1 of 2 answered")
    assert upload_states(store) == {"a": ("reported", "round short: 1 of 2 answered")}
    row = run_row(store)
    assert (row.completed_rounds, row.checkpoint) == (0, b"before" + b"0" * 26)
    assert store.asks.devices_with_open(RUN) == set()


def test_closing_a_round_leaves_other_rounds_and_runs_alone(store: Store) -> None:
    store.runs.begin("other", {})
    store.runs.start_round("other", ["a"])
    store.asks.add([Ask(**ask_row("a", run="other"))])
    foreign = store.asks.of_step("other", 1, 1)[0].id
    accept(store, foreign)
    store.runs.start_round(RUN, ["a"])
    store.runs.close_round(RUN, 1, b"c", [], {})
    assert store.asks.uploads("other")[0].status == "acknowledged"
    assert store.runs.open_round("other") is not None


def test_upload_is_used_once_even_if_later_round_names_its_ask(store: Store) -> None:
    number = store.runs.start_round(RUN, ["a"])
    (ask,) = ask_devices(store, "a")
    accept(store, ask)
    store.runs.close_short_round(RUN, number, "why")
    store.runs.start_round(RUN, ["a"])
    store.runs.close_round(RUN, 2, b"c", [ask], {})
    assert upload_states(store) == {"a": ("reported", "round short: why")}


def test_a_rollback_takes_back_answers_to_rounds_before_it(store: Store) -> None:
    """In a buffered run round 2 uses the answer of device a to round 1."""
    store.runs.set_keep_checkpoints(RUN, 5)
    none = (0, 0)
    first = store.runs.start_round(RUN, ["a"])
    (late,) = ask_devices(store, "a", number=first)
    store.runs.close_round(RUN, first, b"c" * 32, [], {}, none)
    second = store.runs.start_round(RUN, ["b"])
    (own,) = ask_devices(store, "b", number=second)
    for ask in (late, own):
        accept(store, ask)
    store.runs.close_round(RUN, second, b"d" * 32, [late, own], {STALENESS: {"a": second - first, "b": 0}}, none)
    assert {status for status, _ in upload_states(store).values()} == {"used"}
    store.runs.roll_back(RUN, first)
    assert {device: status for device, (status, _) in upload_states(store).items()} == {
        "a": "reported",
        "b": "reported",
    }


def test_an_undone_round_does_not_end_a_row_of_short_rounds(store: Store) -> None:
    """Closed, short, undone and short: two are short since the last completed round."""
    store.runs.set_keep_checkpoints(RUN, 5)
    for state in "csc":
        number = store.runs.start_round(RUN, ["a"])
        if state == "c":
            store.runs.close_round(RUN, number, bytes([number]) * 32, [], {})
        else:
            store.runs.close_short_round(RUN, number, "too few")
    assert store.runs.short_rounds_in_a_row(RUN) == 0
    store.runs.roll_back(RUN, 1)
    store.runs.close_short_round(RUN, store.runs.start_round(RUN, ["a"]), "too few")
    assert store.runs.short_rounds_in_a_row(RUN) == 2


@settings(max_examples=30)
@given(st.data())
def test_every_receipt_is_used_or_reported_once_round_is_over(data: st.DataObject) -> None:
    """The promise behind a receipt: never lost, never counted twice."""
    with_memory = Store.in_memory()
    with_memory.runs.begin(RUN, CONFIG)
    devices = data.draw(st.sets(st.sampled_from("abcdef"), min_size=1))
    number = with_memory.runs.start_round(RUN, sorted(devices))
    asks = ask_devices(with_memory, *devices)
    answered = data.draw(st.lists(st.sampled_from(asks)))  # some twice
    for ask in answered:
        accept(with_memory, ask)
    used = data.draw(st.sets(st.sampled_from(asks)))
    if data.draw(st.booleans()):
        with_memory.runs.close_round(RUN, number, b"c", sorted(used), {})
        expected = {ask: "used" if ask in used else "reported" for ask in answered}
    else:
        with_memory.runs.close_short_round(RUN, number, "short")
        expected = dict.fromkeys(answered, "reported")
    rows = with_memory.asks.uploads(RUN)
    assert {row.ask: row.status for row in rows} == expected
    assert len(rows) == len(set(answered))
    assert all(row.reason for row in rows if row.status == "reported")
    assert all(accept(with_memory, ask) is None for ask in set(asks) - set(answered))


# --- asks and answers


def test_asks_written_again_stay_as_they_are(store: Store) -> None:
    (first,) = ask_devices(store, "a")
    accept(store, first)
    store.asks.add([Ask(**ask_row("a", payload=b"x" * 32)), Ask(**ask_row("b", payload=None, payload_bytes=0))])
    asks = store.asks.of_step(RUN, 1, 1)
    assert [(ask.device, ask.status, ask.payload) for ask in asks] == [
        ("a", "answered", b"p" * 32),
        ("b", "open", b""),
    ]
    assert asks[0].id == first


def test_asks_come_in_device_order_joined_with_their_answers(store: Store) -> None:
    ids = ask_devices(store, "b", "a", "c")
    accept(store, ids[1], attempt=2)
    pairs = store.summaries.asks_of_round(RUN, 1)
    assert [(ask.device, upload and (upload.sha256, upload.samples)) for ask, upload in pairs] == [
        ("a", None),
        ("b", (b"\2" * 32, 12)),
        ("c", None),
    ]
    one = store.asks.get(RUN, 1, 1, "b")
    assert one is not None
    assert (one.seed, one.expects) == (2**63 - 1, {"knowledge": "sample_knowledge"})
    assert store.asks.get(RUN, 1, 2, "b") is None


def test_asks_of_a_step_are_read_when_they_are_due(store: Store) -> None:
    ids = ask_devices(store, "a", "B", "c", "d", "e")
    ask_devices(store, "a", step_number=2)
    assert store.asks.devices_of_step(RUN, 1, 1) == {"a", "B", "c", "d", "e"}
    read = store.asks.each_of_step(RUN, 1, 1, most=2)
    first = next(read)
    store.asks.close(ids[1], "gone")  # of the same page, which has been read
    store.asks.close(ids[4], "gone")
    rest = list(read)
    assert [ask.device for ask in (first, *rest)] == ["B", "a", "c", "d", "e"]
    assert [ask.status for ask in rest] == ["open", "open", "open", "out"]
    assert list(store.asks.each_of_step(RUN, 2, 1, most=2)) == []


def test_the_next_ask_is_the_oldest_open_one(store: Store) -> None:
    (first,) = ask_devices(store, "a")
    (second,) = ask_devices(store, "a", step_number=2)
    assert next_open(store) == first
    store.asks.close(first, "why not")
    assert next_open(store) == second
    assert store.asks.devices_with_open(RUN) == {"a"}
    accept(store, second)
    assert store.asks.next_open(RUN, "a") is None
    assert store.asks.devices_with_open(RUN) == set()


def test_a_payload_is_meant_for_the_devices_whose_asks_name_it(store: Store) -> None:
    ask_devices(store, "a")
    assert store.asks.with_payload(RUN, "a", b"p" * 32)
    assert not store.asks.with_payload(RUN, "b", b"p" * 32)
    assert not store.asks.with_payload(RUN, "a", b"q" * 32)
    assert not store.asks.with_payload("other", "a", b"p" * 32)


def test_a_note_of_refusals_has_the_time_of_the_newest(store: Store) -> None:
    times = iter([100.0, 200.0])
    store.database.now = lambda: next(times)
    known = store.history.note_refusals_left_out(RUN, "a", "3 further refusals", None)
    store.history.note_refusals_left_out(RUN, "a", "4 further refusals", known)
    (event,) = store.history.events(RUN)
    assert (event.text, event.at) == ("4 further refusals", 200.0)


def test_reused_event_number_is_not_taken_for_earlier_note(store: Store) -> None:
    known = store.history.note_refusals_left_out(RUN, "a", "3 further refusals", None)
    assert store.history.note_refusals_left_out(RUN, "a", "4 further refusals", known) == known
    store.runs.delete(RUN)
    store.runs.begin(RUN, CONFIG)
    store.history.add_event(RUN, "late", "a did not answer", device="a")
    (event,) = store.history.events(RUN)
    assert (event.id == known) is isinstance(store.database, SqliteDatabase)  # PostgreSQL gives no number twice
    store.history.note_refusals_left_out(RUN, "a", "5 further refusals", known)
    assert [event.text for event in store.history.events(RUN)] == ["a did not answer", "5 further refusals"]


def test_the_first_answer_wins_and_later_ones_get_its_receipt(store: Store) -> None:
    (ask,) = ask_devices(store, "a")
    assert store.asks.upload_of(ask) is None
    first = accept(store, ask, attempt=1)
    assert first is not None
    assert accept(store, ask, attempt=1) == first
    assert accept(store, ask, attempt=2) == first
    assert store.asks.upload_of(ask) == first
    assert (first.attempt, first.status, len(first.receipt)) == (1, "acknowledged", 32)


def test_receipts_are_different(store: Store) -> None:
    rows = [accept(store, ask) for ask in ask_devices(store, "a", "b")]
    assert len({row.receipt for row in rows if row}) == 2


def test_a_closed_ask_takes_no_answer(store: Store) -> None:
    (ask,) = ask_devices(store, "a")
    store.asks.close(ask, "deadline passed")
    assert accept(store, ask) is None
    assert store.asks.uploads(RUN) == []


def test_work_is_the_oldest_open_ask_with_the_state_of_the_run(store: Store) -> None:
    first, second = ask_devices(store, "a", step_number=1) + ask_devices(store, "a", step_number=2)
    ask_devices(store, "b")
    for open_ask in (first, second, None):
        work = store.asks.work_of(RUN, "a")
        assert work is not None
        assert (work.status, work.reason, work.completed_rounds, work.lost_attempt) == ("preparing", "", 0, 0)
        assert work.ask == next((ask for ask in store.asks.of_run(RUN) if ask.id == open_ask), None)
        if open_ask is not None:
            store.asks.close(open_ask, "not made")
    assert store.asks.work_of("other", "a") is None


def test_open_asks_of_a_step_are_closed_for_some_devices(store: Store) -> None:
    ask_devices(store, "a", "b", "c", step="deliver")
    ask_devices(store, "a", "d", step_number=2, step="train")
    answered = store.asks.get(RUN, 1, 1, "b")
    assert answered is not None
    accept(store, answered.id)
    assert store.asks.devices_with_open(RUN) == {"a", "c", "d"}
    assert store.asks.devices_with_open(RUN, "deliver") == {"a", "c"}
    assert store.asks.devices_with_open(RUN, "other") == set()
    closed = store.asks.close_step(RUN, "deliver", ["a", "b", "d", "x"], "not made")
    assert closed == [(1, "a", b"p" * 32)]
    row = store.asks.get(RUN, 1, 1, "a")
    assert row is not None
    assert (row.status, row.reason) == ("out", "not made")
    assert store.asks.devices_with_open(RUN) == {"a", "c", "d"}, "a's other ask is open"
    assert store.asks.devices_with_open(RUN, "deliver") == {"c"}
    assert store.asks.close_step(RUN, "deliver", ["a"], "again") == []


def test_an_answered_ask_is_not_closed_any_more(store: Store) -> None:
    (ask,) = ask_devices(store, "a")
    accept(store, ask)
    store.asks.close(ask, "too late")
    row = store.asks.get(RUN, 1, 1, "a")
    assert row is not None
    assert (row.status, row.reason) == ("answered", "")


def test_asks_past_their_deadline_are_closed_with_an_event_each(store: Store) -> None:
    ask_devices(store, "late", deadline_at=100.0)
    ask_devices(store, "in time", deadline_at=200.0)
    (answered,) = ask_devices(store, "quick", deadline_at=100.0)
    accept(store, answered)
    assert [ask.device for ask in store.asks.expire(RUN, 150.0)] == ["late"]
    assert store.asks.expire(RUN, 150.0) == []
    states = {ask.device: (ask.status, ask.reason) for ask in store.asks.of_step(RUN, 1, 1)}
    assert states == {"late": ("out", "deadline passed"), "in time": ("open", ""), "quick": ("answered", "")}
    (event,) = store.history.events(RUN, "late")
    assert (event.text, event.round, event.device) == (
        "late did not answer step 'train' before its deadline",
        1,
        "late",
    )


def test_an_answer_without_disk_space_is_not_called_late(store: Store) -> None:
    full, taken = (ask_devices(store, device, deadline_at=100.0)[0] for device in ("full", "taken"))
    for ask in (full, taken):
        store.asks.note_no_space(ask)
    accept(store, taken)
    store.asks.note_no_space(taken)
    store.asks.expire(RUN, 150.0)
    states = {ask.device: (ask.status, ask.reason) for ask in store.asks.of_step(RUN, 1, 1)}
    assert states == {"full": ("out", "refused: no space on the disk"), "taken": ("answered", "")}
    assert store.history.events(RUN, "late") == []
    (event,) = store.history.events(RUN, "no-space")
    assert (event.round, event.device) == (1, "full")
    assert event.text == (
        "the answer of full to step 'train' was refused because the disk had no space, and its deadline has passed; "
        "the device drops out of the round"
    )


# --- what happened


def test_a_restart_bounds_deadlines_and_extends_none(store: Store) -> None:
    began = store.asks.clock.now()
    for device, seconds in (("soon", 10.0), ("late", 7200.0)):
        ask_devices(store, device, deadline_at=began + seconds)
    store.asks.bound_deadlines(RUN, 600.0)
    ended = store.asks.clock.now()
    late, soon = store.asks.of_step(RUN, 1, 1)
    assert soon.deadline_at == began + 10.0
    assert began + 600.0 <= late.deadline_at <= ended + 600.0


def test_a_lost_answer_is_asked_for_again_only_in_time(store: Store) -> None:
    for device in ("a", "late", "away", "d"):
        store.devices.register(RUN, device, b"h", b"")
    over = store.runs.start_round(RUN, ["d"])
    asks = {"d": ask_devices(store, "d", number=over)[0]}
    accept(store, asks["d"])
    store.runs.close_round(RUN, over, b"c" * 32, [asks["d"]], {})
    number = store.runs.start_round(RUN, ["a", "late", "away"])
    for device, seconds in (("a", 600.0), ("late", -1.0), ("away", 600.0)):
        deadline = store.asks.clock.now() + seconds
        asks[device] = ask_devices(store, device, number=number, deadline_at=deadline)[0]
        accept(store, asks[device])
    store.devices.mark_absent(RUN, "away", "device left")
    for ask in asks.values():
        store.asks.withdraw_upload(ask, "it is damaged")
    rows = [*store.asks.of_step(RUN, over, 1), *store.asks.of_step(RUN, number, 1)]
    assert {row.device: (row.status, (row.reason or "").rpartition(", ")[2]) for row in rows} == {
        "a": ("open", ""),
        "late": ("out", "deadline passed"),
        "away": ("out", "device not present"),
        "d": ("out", "round closed"),
    }
    assert [row.status for row in store.asks.uploads(RUN)] == ["reported"] * 4
    work = store.asks.work_of(RUN, "a")
    assert work is not None
    assert work.ask is not None
    assert (work.ask.id, work.lost_attempt) == (asks["a"], 1)


def test_a_step_ends_with_the_answers_of_devices_that_count(store: Store) -> None:
    """Device b was asked before a crash, and is no longer part of the step."""
    a, b, c, _ = ask_devices(store, "a", "b", "c", "d")
    among = ("a", "c", "d")
    for ask in (a, b):
        accept(store, ask)
    assert not store.asks.end_step(RUN, 1, 1, 2, among)
    assert store.asks.devices_with_open(RUN) == {"c", "d"}
    accept(store, c)
    assert store.asks.end_step(RUN, 1, 1, 2, among)
    assert {row.device: (row.status, row.reason) for row in store.asks.of_step(RUN, 1, 1)} == {
        **dict.fromkeys("abc", ("answered", "")),
        "d": ("out", "enough devices answered"),
    }


def test_devices_that_are_out_are_counted_by_reason(store: Store) -> None:
    asks = ask_devices(store, "a", "b", "c", "d", "e", "f")
    for ask, reason in zip(asks, ["device revoked", "declined", "declined"], strict=False):
        store.asks.close(ask, reason)
    ask_devices(store, "c", step_number=2)  # also out of the second step, for the same reason
    for row in store.asks.of_step(RUN, 1, 2):
        store.asks.close(row.id, "declined")
    accept(store, asks[3])
    store.asks.end_step(RUN, 1, 1, 1, "def")  # e and f are not out: the step needs them no more
    assert list(store.asks.reasons_out(RUN, 1).items()) == [("declined", 2), ("device revoked", 1)]
    assert store.asks.reasons_out(RUN, 2) == {}


def test_events_come_oldest_first_and_by_kind(store: Store) -> None:
    store.history.add_event(RUN, "refused", "first", number=2, device="a", code="bad-value")
    store.history.add_event(RUN, "late", "second")
    store.history.add_event(RUN, "refused", "third")
    assert [event.text for event in store.history.events(RUN)] == ["first", "second", "third"]
    assert [event.text for event in store.history.events(RUN, "refused")] == ["first", "third"]
    assert store.history.events("other") == []
    event = store.history.events(RUN)[0]
    assert (event.round, event.device, event.code) == (2, "a", "bad-value")


def test_a_figure_reported_again_is_replaced_whole(store: Store) -> None:
    counts = [ClassCount(label=1, sum=1.0, count=2)]
    early = Metrics(metrics=[Metric(name="accuracy", split="test", sum=1.0, count=4, by_class=counts)])
    counts = [ClassCount(label=0, sum=3.0, count=4)]
    late = Metrics(metrics=[Metric(name="accuracy", split="test", sum=3.0, count=4, by_class=counts)])
    store.history.add_figures(RUN, 1, "a", early)
    store.history.add_figures(RUN, 1, "a", late)
    (row,) = store.history.figures(RUN, "accuracy", "test")
    assert (row.sum, row.count, row.by_class) == (3.0, 4, {"0": (3.0, 4)})


def test_only_requested_figures_come_by_round_and_device(store: Store) -> None:
    for number, device in ((2, "a"), (1, "b"), (1, "a")):
        store.history.add_figures(RUN, number, device, make_metrics())
    store.history.add_figures(RUN, 1, "a", make_metrics(name="loss"))
    assert [(row.round, row.device) for row in store.history.figures(RUN, "accuracy", "test")] == [
        (1, "a"),
        (1, "b"),
        (2, "a"),
    ]
    assert store.history.figures(RUN, "accuracy", "train") == []


def test_figures_of_last_round_are_of_last_completed_round(store: Store) -> None:
    assert store.history.figures_of_last_round(RUN, "accuracy", "test") == []
    for number, device in ((1, "a"), (2, "b"), (2, "a"), (3, "a")):
        store.history.add_figures(RUN, number, device, make_metrics())
    for number in (1, 2):
        assert store.runs.start_round(RUN, ["a", "b"]) == number
        store.runs.close_round(RUN, number, b"c", [], {})
    store.runs.start_round(RUN, ["a", "b"])
    rows = store.history.figures_of_last_round(RUN, "accuracy", "test")
    assert [(row.round, row.device) for row in rows] == [(2, "a"), (2, "b")]


def test_traffic_adds_up_by_round_device_and_direction(store: Store) -> None:
    for amount in (10, 20):
        store.history.add_traffic(RUN, 1, "a", "up", counted(sample_knowledge=amount), 1)
    store.history.add_traffic(RUN, 1, "a", "down", counted(refined_knowledge=5), 2)
    store.history.add_traffic(RUN, 2, "a", "up", counted(sample_knowledge=4, generator=3), 3)
    rows = [(r.round, r.direction, r.payloads, r.tensor_bytes, r.envelope_bytes) for r in store.history.traffic(RUN)]
    assert rows == [(1, "down", 1, 5, 2), (1, "up", 2, 30, 2), (2, "up", 1, 7, 3)]


def counted(**tensor: int) -> Counted:
    """Bytes by kind, packed to one less."""
    return Counted(Counter(tensor), Counter({kind: size - 1 for kind, size in tensor.items()}))


def test_traffic_is_told_apart_by_kind_and_by_what_travelled(store: Store) -> None:
    for _ in range(2):
        store.history.add_traffic(RUN, 2, "a", "up", counted(sample_knowledge=4, generator=3), 9)
    store.history.add_traffic("another", 2, "a", "up", counted(generator=1), 9)
    assert [tuple(asdict(row).values()) for row in store.history.traffic_by_kind(RUN)] == [
        (2, "a", "up", "envelope", 2, 0, 18, 18),
        (2, "a", "up", "generator", 0, 6, 0, 4),
        (2, "a", "up", "sample_knowledge", 0, 8, 0, 6),
    ]
    assert store.history.traffic(RUN)[0].sent_bytes == 28


# --- transactions


def test_a_transaction_that_fails_leaves_nothing(store: Store) -> None:
    def write() -> None:
        with store.transaction():
            store.history.add_event(RUN, "kind", "text")
            store.runs.start_round(RUN, ["a"])
            raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="the caller's own"):
        write()
    assert (store.history.events(RUN), store.runs.rounds(RUN), run_row(store).next_round) == ([], [], 1)


def test_a_nested_transaction_that_fails_takes_only_itself_back(store: Store) -> None:
    def fail() -> None:
        with store.transaction():
            store.history.add_event(RUN, "kind", "inside")
            with store.transaction():
                store.history.add_event(RUN, "kind", "deep inside")
            raise ZeroDivisionError

    with store.transaction():
        store.history.add_event(RUN, "kind", "before")
        with pytest.raises(ZeroDivisionError):
            fail()
        with store.transaction():
            store.history.add_event(RUN, "kind", "after")
    assert [event.text for event in store.history.events(RUN)] == ["before", "after"]


def test_statements_together_are_a_transaction_or_part_of_one(store: Store) -> None:
    def fail() -> None:
        with store.database.together():
            store.history.add_event(RUN, "kind", "text")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert store.history.events(RUN) == []
    with store.transaction(), pytest.raises(ZeroDivisionError):
        fail()
    assert [event.text for event in store.history.events(RUN)] == ["text"], "unlike a nested transaction"


def test_a_transaction_sees_its_own_writes(store: Store) -> None:
    with store.transaction():
        store.history.add_event(RUN, "kind", "text")
        assert len(store.history.events(RUN)) == 1


def test_only_unused_tokens_are_revoked(store: Store) -> None:
    """A device whose token is used may repeat its call, as after a lost reply."""
    hashes = [bytes([first]) * 32 for first in (0x10, 0x11, 0x20)]
    store.credentials.add_tokens(dict.fromkeys(hashes, ""), "", time.time() + 600)
    expires_at = time.time() + 600
    certificate = Certificate(
        serial="1", device="a", run="", public_key=b"", pem=b"", issued_at=0.0, expires_at=expires_at
    )
    store.credentials.use_token(hashes[0], certificate)
    assert [store.credentials.revoke_tokens(prefix) for prefix in ("1", "1", "2", "")] == [1, 0, 1, 0]
    result = {token.hash: (token.is_revoked, token.device) for token in store.credentials.tokens()}
    assert result == dict(zip(hashes, [(False, "a"), (True, None), (True, None)], strict=True))


def test_errors_of_the_database_are_store_errors(store: Store) -> None:
    store.close()
    with pytest.raises(StoreError, match="database error: Cannot operate on a closed database"):
        store.runs.get(RUN)


def test_a_change_of_status_follows_the_table(store: Store) -> None:
    for status in RunStatus:
        for following in RunStatus:
            name = f"{status}-{following}"
            store.runs.begin(name, {})
            store.database.write("UPDATE runs SET status = ? WHERE name = ?", status, name)
            if following in (status, *TRANSITIONS[RunStatus][status]):
                store.runs.set_status(name, following, "")
                assert store.runs.status(name) is following
            else:
                with pytest.raises(RunError, match=f"is {status} and cannot become {following}"):
                    store.runs.set_status(name, following, "")
                assert store.runs.status(name) is status


def test_a_cancelled_run_stays_cancelled(store: Store) -> None:
    number = store.runs.start_round(RUN, [])
    store.runs.close_round(RUN, number, b"c" * 32, [], {})
    store.runs.cancel(RUN, "by ada")
    changes = (
        lambda: store.runs.publish_contract(RUN, b"contract"),
        lambda: store.runs.roll_back(RUN, number, "ada"),
        lambda: store.run_control.activate(RUN),
        lambda: store.run_control.set_status(RUN, RunStatus.PAUSED, ""),
    )
    for change in changes:
        with pytest.raises(RunError, match="is cancelled and cannot become"):
            change()
    assert store.runs.status(RUN) is RunStatus.CANCELLED
