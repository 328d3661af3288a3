"""What `runs show` and `devices` make of a store: every row has its own figures, and the store is read once."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fleetdistill.knowledge import Metric, Metrics
from fleetdistill.methods import METHODS
from fleetdistill.methods.classstats.exchange import (
    LEAVE_ONE_OUT,
    OWN_KEPT,
    OWN_LEAVE_ONE_OUT,
    PERSONAL_LEAVE_ONE_OUT,
)
from fleetdistill.replacement import REPLACED, SPLIT
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_console.tables import heading, tables
from fleetdistill_server.methods import server_class
from fleetdistill_server.service.served import Served
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.views import runs as views

DEVICES = ("a", "b")
NOTHING_INTACT = "no intact earlier checkpoint is kept. Copy blobs/7d/7d.safetensors, `fleetdistill runs start r`"


def filled(rounds: int) -> Store:
    """Device a has accuracy .1 x round, b twice that; a guard fires in each round as often as its number says."""
    store = Store.in_memory()
    store.runs.begin("r", {"run": {"name": "r", "method": "feddkc", "rounds": rounds}})
    for device in DEVICES:
        store.devices.register("r", device, b"", contract_pb2.DeviceProfile().SerializeToString())
    for number in range(1, rounds + 1):
        store.runs.start_round("r", DEVICES)
        for factor, device in enumerate(DEVICES, start=1):
            store.history.add_figures("r", number, device, figures(number * factor, replaced=device == "a"))
        for guard in range(number):
            store.history.add_event("r", "teacher-guard", str(guard), number=number, device="a")
        store.runs.close_round("r", number, b"", [], {})
    return store


def figures(tenths: int, *, replaced: bool) -> Metrics:
    return Metrics(
        metrics=[
            Metric(name="accuracy", split="test", sum=tenths, count=10),
            Metric(name="loss", split="train", sum=tenths, count=5),
            Metric(name=REPLACED, split=SPLIT, sum=float(replaced), count=1),
        ]
    )


def test_a_finished_run_shows_when_its_last_round_ended() -> None:
    store = filled(3)
    assert "ended" not in views.run(store, "r").facts
    store.runs.set_status("r", RunStatus.FINISHED, "3 rounds completed")
    store.database.write("UPDATE rounds SET ended_at = 1e9 + round")
    assert views.run(store, "r").facts["ended"] == "2001-09-09T01:46:43Z"
    store.close()


@pytest.mark.parametrize(("rounds", "wanted", "told"), [(0, None, "until stopped"), (3, 3, "3")])
def test_a_run_without_an_end_wants_no_number_of_rounds(rounds: int, wanted: int | None, told: str) -> None:
    store = Store.in_memory()
    store.runs.begin("r", {"run": {"name": "r", "method": "feddkc", "rounds": rounds}})
    for view in (views.runs(store), views.run(store, "r")):
        row = view.facts or view.lists["runs"][0]
        assert row["wanted_rounds"] == wanted
        console = Console(width=200, record=True)
        for table in tables(view):
            console.print(table)
        assert told in console.export_text()


def test_only_a_served_run_says_that_it_needs_devices() -> None:
    store = Store.in_memory()
    store.runs.begin("r", {})
    store.run_control.begin_wait("r", 2)
    reasons = [views.runs(store, served).lists["runs"][0]["reason"] for served in (Served(frozenset({"r"})), Served())]
    assert reasons == ["needs 2 devices that are present", ""]


@pytest.mark.parametrize(
    ("devices", "reason"), [(1, "needs 1 device that is present"), (2, "needs 2 devices that are present")]
)
def test_a_waiting_run_says_how_many_devices_it_needs(devices: int, reason: str) -> None:
    store = Store.in_memory()
    store.runs.begin("r", {"run": {"name": "r"}})
    store.run_control.begin_wait("r", devices)
    assert views.runs(store, Served(frozenset({"r"}))).lists["runs"][0]["reason"] == reason


@pytest.mark.parametrize(
    ("status", "why", "shown"),
    [
        (RunStatus.STOPPED, "by the operator", "by the operator; to continue: `fleetdistill runs start r`"),
        (RunStatus.PAUSED, "", "to continue: `fleetdistill runs start r`"),
        (RunStatus.STOPPED, "use `fleetdistill runs rollback r`", "use `fleetdistill runs rollback r`"),
        (RunStatus.STOPPED, NOTHING_INTACT, NOTHING_INTACT),
        (RunStatus.CANCELLED, "by the operator", "by the operator"),
    ],
)
def test_an_ended_engine_s_run_names_what_continues_it(status: RunStatus, why: str, shown: str) -> None:
    store = Store.in_memory()
    store.runs.begin("r", {"run": {"name": "r", "rounds": 3}})
    store.runs.set_status("r", status, why)
    assert views.runs(store).lists["runs"][0]["reason"] == views.run(store, "r").facts["reason"] == shown


def test_a_stopped_run_without_rounds_to_go_names_no_start() -> None:
    store = filled(1)
    store.runs.set_status("r", RunStatus.STOPPED, "by the operator")
    assert views.run(store, "r").facts["reason"] == "by the operator"


def test_a_stopped_run_without_a_last_round_names_a_start() -> None:
    store = Store.in_memory()
    store.runs.begin("r", {"run": {"name": "r", "rounds": 0}})
    store.runs.set_status("r", RunStatus.STOPPED, "by the operator")
    assert views.run(store, "r").facts["reason"] == "by the operator; to continue: `fleetdistill runs start r`"


def test_a_queued_run_shows_its_place_in_the_queue() -> None:
    store = filled(1)
    served = Served(queued=("first", "r", "last"))
    assert views.run(store, "r", served).facts["status"] == "queued (2 of 3)"


def test_only_a_revoked_device_is_shown_as_revoked() -> None:
    store = filled(1)
    store.credentials.revoke("device:a", "stolen")
    store.credentials.revoke("operator:b", "left")  # a person of the other device's name
    rows = views.devices(store, "r").lists["devices"]
    assert {row["device"]: row["revoked"] for row in rows} == {"a": True, "b": False}


@pytest.mark.parametrize("present", [True, False])
def test_devices_that_are_present_are_told_from_registered(present: bool) -> None:
    store = filled(1)
    store.devices.mark_absent("r", "a", "left")
    listed, shown = views.runs(store, present=present), views.run(store, "r", present=present)
    assert (listed.lists["runs"][0]["present"], listed.lists["runs"][0]["devices"]) == (int(present), 2)
    assert (shown.facts["present"], shown.facts["devices"]) == (int(present), 2)
    console = Console(width=200, record=True)
    for table in [*tables(listed), *tables(views.View({}, shown.facts))]:
        console.print(table)
    assert console.export_text().count("devices registered") == 2


def test_names_of_facts_and_lists_from_a_server_are_escaped() -> None:
    name = "\x1b[2J\x9b\u202e\nrun"
    console = Console(record=True, width=200, file=io.StringIO())
    for table in tables(views.View(facts={name: "a"}, lists={f"{name}1": [{"b": "c"}], f"{name}2": []})):
        console.print(table)
    text = console.export_text()
    together = "".join(text.split())  # a title is as narrow as its table
    assert together.count("\\x1b[2J\\x9b\\u202e\\nrun") == 3
    assert all(line.isprintable() for line in text.splitlines())


def test_a_round_has_its_own_figures() -> None:
    shown = views.run(filled(2), "r")
    first, second = shown.lists["rounds"]
    assert (first["test_accuracy"], second["test_accuracy"]) == pytest.approx((0.15, 0.3))
    assert (first["train_loss"], second["train_loss"]) == pytest.approx((0.3, 0.6))
    assert (first["guards"], second["guards"]) == (1, 2)
    assert [(row["kept"], row["replaced"]) for row in (first, second)] == [(1, 1), (1, 1)]
    assert {name: shown.facts[name] for name in ("guards_fired", "models_replaced", "models_kept")} == {
        "guards_fired": 3,
        "models_replaced": 2,
        "models_kept": 2,
    }


def test_models_that_were_kept_are_told_from_those_replaced() -> None:
    store = Store.in_memory()
    store.runs.begin("r", {"run": {"name": "r", "method": "feddkc", "rounds": 2}})
    for replaced in (False, True):
        number = store.runs.start_round("r", DEVICES)
        for device in DEVICES:
            store.history.add_figures("r", number, device, figures(1, replaced=replaced and device == "a"))
        store.runs.close_round("r", number, b"", [], {})
    facts = views.run(store, "r").facts
    assert (facts["models_kept"], facts["models_replaced"]) == (3, 1)


def test_all_events_are_counted_where_only_the_newest_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "MAX_EVENTS", 2)
    view = views.run(filled(2), "r")  # 1 + 2 guards
    assert (len(view.lists["events"]), view.facts["events_in_all"]) == (2, 3)


def test_a_device_has_its_own_figures_and_the_last_accuracy() -> None:
    a, b = views.devices(filled(2), "r").lists["devices"]
    assert (a["test_accuracy"], b["test_accuracy"]) == pytest.approx((0.2, 0.4))
    assert (a["kept"], a["replaced"], b["kept"], b["replaced"]) == (0, 2, 2, 0)


def test_several_answers_per_device_list_newest_accuracy_of_each() -> None:
    store = filled(2)
    assert "test_accuracy_of_answers" not in views.run(store, "r").lists
    for number in (1, 2):
        metric = Metric(name="personal/accuracy", split="test", sum=5 + number, count=10)
        store.history.add_figures("r", number, "b", Metrics(metrics=[metric]))
    assert views.run(store, "r").lists["test_accuracy_of_answers"] == [
        {"device": "a", "general": 0.2, "personal": None},
        {"device": "b", "general": 0.4, "personal": 0.7},
    ]


def test_names_of_few_devices_do_not_fill_the_list_of_answers() -> None:
    """A device may call its figures what it likes."""
    store = filled(1)
    made_up = [Metric(name=f"{name}/accuracy", split="test", sum=1, count=10) for name in "abcdefgh"]
    general = Metric(name="general/accuracy", split="test", sum=9, count=10)
    nameless = Metric(name="/accuracy", split="test", sum=9, count=10)
    personal = Metric(name="personal/accuracy", split="test", sum=5, count=10)
    column = Metric(name="device/accuracy", split="test", sum=9, count=10)
    store.history.add_figures("r", 1, "a", Metrics(metrics=[*made_up, general, nameless, column, personal]))
    store.history.add_figures("r", 1, "b", Metrics(metrics=[column, personal]))
    first, second = views.run(store, "r").lists["test_accuracy_of_answers"]
    assert first == {"device": "a", "general": 0.1, "a": 0.1, "b": 0.1, "c": 0.1, "personal": 0.5}
    assert (second["general"], second["a"], second["personal"]) == (0.2, None, 0.5)


def left_out(general: float, personal: float, own: float | None = None, *, kept: bool = False) -> Metrics:
    """What a device with ten rows tells; numbers are rows."""
    result = {LEAVE_ONE_OUT: general, PERSONAL_LEAVE_ONE_OUT: personal, OWN_LEAVE_ONE_OUT: own}
    metrics = [Metric(name=name, split="train", sum=sum, count=10) for name, sum in result.items() if sum is not None]
    return Metrics(metrics=[*metrics, Metric(name=OWN_KEPT, split="train", sum=float(kept), count=1)])


def test_what_devices_expect_is_shown_for_each_and_for_the_fleet() -> None:
    """Device b, which keeps its own statistics, uses a personal answer of 9 of 10; the fleet's has 7."""
    store = filled(2)
    without = views.run(store, "r")
    assert "leave_one_out" not in without.lists
    assert not any(name.startswith("leave_one_out") for name in without.facts)
    assert [row["leave_one_out"] for row in views.devices(store, "r").lists["devices"]] == [None, None]
    store.history.add_figures("r", 1, "a", left_out(1, 1, 9, kept=True))  # of a round before
    store.history.add_figures("r", 2, "a", left_out(8, 9, 5))
    store.history.add_figures("r", 1, "b", left_out(6, 7, 9, kept=True))
    shown = views.run(store, "r")
    assert shown.lists["leave_one_out"] == [
        {"device": "a", "general": 0.8, "personal": 0.9, "own_statistics_kept": False},
        {"device": "b", "general": 0.6, "personal": 0.9, "own_statistics_kept": True},
    ]
    assert (shown.facts["leave_one_out_general"], shown.facts["leave_one_out_personal"]) == (0.7, 0.9)
    assert [row["leave_one_out"] for row in views.devices(store, "r").lists["devices"]] == [0.8, 0.6]


def test_the_fleet_expects_by_rows_and_not_by_devices() -> None:
    """9 of 10 rows and 10 of 90 are 19 of 100."""
    store = filled(1)
    for device, right, rows in (("a", 9, 10), ("b", 10, 90)):
        names = (LEAVE_ONE_OUT, PERSONAL_LEAVE_ONE_OUT)
        metrics = [Metric(name=name, split="train", sum=right, count=rows) for name in names]
        store.history.add_figures("r", 1, device, Metrics(metrics=metrics))
    facts = views.run(store, "r").facts
    assert (facts["leave_one_out_general"], facts["leave_one_out_personal"]) == (0.19, 0.19)


def test_a_device_that_asks_to_be_forgotten_no_longer_counts() -> None:
    """At once, not only when its data are deleted, and in no row, not even its own."""
    store = filled(1)
    store.history.add_figures("r", 1, "a", left_out(2, 3, 4))
    store.history.add_figures("r", 1, "b", left_out(8, 9, 5))
    store.devices.ask_to_forget("r", "a")
    shown = views.run(store, "r")
    assert [row["device"] for row in shown.lists["leave_one_out"]] == ["b"]
    assert shown.facts["leave_one_out_general"] == 0.8
    assert [row["leave_one_out"] for row in views.devices(store, "r").lists["devices"]] == [None, 0.8]


def test_figures_of_an_undone_round_are_not_expected() -> None:
    store = filled(0)
    store.runs.set_keep_checkpoints("r", 2)
    for number, (device, told) in enumerate({"a": left_out(2, 3, 4), "b": left_out(8, 9, 5)}.items(), start=1):
        store.runs.start_round("r", DEVICES)
        store.history.add_figures("r", number, device, told)
        store.runs.close_round("r", number, bytes([number]), [], {})
    store.runs.roll_back("r", 1)
    shown = views.run(store, "r")
    assert [row["device"] for row in shown.lists["leave_one_out"]] == ["a"]
    assert shown.facts["leave_one_out_general"] == 0.2


def test_a_device_that_tells_half_of_it_expects_nothing() -> None:
    store = filled(1)
    half = [Metric(name=LEAVE_ONE_OUT, split="train", sum=1, count=10)]
    store.history.add_figures("r", 1, "a", Metrics(metrics=half))
    none = [Metric(name=item, split="train", sum=0, count=0) for item in (LEAVE_ONE_OUT, PERSONAL_LEAVE_ONE_OUT)]
    store.history.add_figures("r", 1, "b", Metrics(metrics=none))
    assert "leave_one_out" not in views.run(store, "r").lists


def reads(store: Store, view: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a view asks the database what."""
    asked: Counter[str] = Counter()
    rows = store.database.rows

    def counted(sql: str, *values: Any) -> Any:
        asked[sql] += 1
        return rows(sql, *values)

    monkeypatch.setattr(store.database, "rows", counted)
    view(store, "r")
    return asked


@pytest.mark.parametrize("view", [views.run, views.devices])
def test_the_store_is_asked_as_often_for_many_rounds_as_for_one(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads(filled(8), view, monkeypatch) == reads(filled(1), view, monkeypatch)


def test_a_device_more_does_not_ask_the_store_again(monkeypatch: pytest.MonkeyPatch) -> None:
    more = filled(1)
    more.devices.register("r", "c", b"", contract_pb2.DeviceProfile().SerializeToString())
    assert reads(more, views.devices, monkeypatch) == reads(filled(1), views.devices, monkeypatch)


def test_the_operators_page_explains_every_column_of_a_round() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/runs.md").read_text(encoding="utf-8")
    table = page.split("with these columns:")[1].split("\n\n")[1]
    explained = {name for cell in re.findall(r"^\| ([a-z, ]+) \|", table, re.MULTILINE) for name in cell.split(", ")}
    of_methods = {name for method in METHODS for name in server_class(method).figures}
    columns = {heading(name) for name in (*views.run(filled(1), "r").lists["rounds"][0], *of_methods)}
    assert columns - {"round"} == explained - {"column"}


def test_suspects_are_left_out_in_three_successive_own_rounds() -> None:
    """Device a is left out in rounds 1, 2, 4 and 5 and not asked in 3; b in 1, 2 and 4, and counts in 3."""
    store = Store.in_memory()
    store.runs.begin("r", {"run": {"name": "r", "method": "fedavg", "rounds": 5}})
    left_out = {"a": {1, 2, 4, 5}, "b": {1, 2, 4}}
    for device in DEVICES:
        store.devices.register("r", device, b"", contract_pb2.DeviceProfile().SerializeToString())
    for number in range(1, 6):
        cohort = ["b"] if number == 3 else list(DEVICES)
        store.runs.start_round("r", cohort)
        row: dict[str, Any] = {"run": "r", "round": number, "step_number": 1, "step": "train", "expects": {}, "seed": 1}
        row |= {"payload": None, "payload_bytes": 0, "deadline_at": 1e12}
        store.asks.add([Ask(**row, device=device) for device in cohort])
        asks = store.asks.of_step("r", number, 1)
        for ask in asks:
            store.asks.accept_upload(ask.id, 1, bytes(32), 0, 1)
            if number in left_out[ask.device]:
                store.history.add_event("r", "update-left-out", "far off", number=number, device=ask.device)
        store.runs.close_round("r", number, b"", [ask.id for ask in asks], {})
    rounds = views.run(store, "r").lists["rounds"]
    assert [row["suspects"] for row in rounds] == ["", "", "", "a", "a"]
    store.close()


def test_round_columns_have_headings_for_people_and_script_names() -> None:
    store = Store.in_memory()
    store.runs.begin("r", {})
    store.runs.start_round("r", ["a", "b"])
    view = views.run(store, "r")
    console = Console(width=200, record=True)
    console.print(*tables(view))
    printed = console.export_text()
    assert "devices asked" in printed
    assert "answers not used" in printed
    assert json.loads(view.json())["rounds"][0]["cohort"] == 2
    store.close()


def test_json_has_null_for_what_it_has_no_number_for() -> None:
    view = views.View({"rows": [{"loss": math.inf, "rates": [0.5, math.nan]}]}, {"name": "r"})
    assert json.loads(view.json(), parse_constant=pytest.fail) == {
        "name": "r",
        "rows": [{"loss": None, "rates": [0.5, None]}],
    }
