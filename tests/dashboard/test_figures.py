"""What the pages compute: series that are thinned, axes, timelines, sums and texts with units."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetdistill_console.dashboard import units
from fleetdistill_console.dashboard.actions import RUN_ACTIONS
from fleetdistill_console.dashboard.chart import MAX_POINTS, thin
from fleetdistill_console.dashboard.pages.run import last_accuracy, time_left
from fleetdistill_console.dashboard.pages.runs import accuracy
from fleetdistill_console.dashboard.panels.classes import bubbles, note, spread, totals
from fleetdistill_console.dashboard.panels.curves import axis
from fleetdistill_console.dashboard.panels.embed import address, embedding
from fleetdistill_console.dashboard.panels.round import (
    MAX_DEVICES,
    bars,
    furthest_behind,
    latest_time,
    newest_asks,
    phases,
    sentence,
)
from fleetdistill_console.dashboard.panels.tables import by_kind, presence
from fleetdistill_server.store.states import ACTIVE, IDLE, QUEUED, WAITING


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5000))
def test_a_thinned_series_keeps_its_peaks_its_order_and_its_end(values: list[float]) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    kept = thin(points)
    assert len(kept) <= MAX_POINTS
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    assert kept[-1] == points[-1]
    assert (max(y for _, y in kept), min(y for _, y in kept)) == (max(values), min(values))


ROUNDS = [
    {"round": 1, "bytes_up": 1_000_000, "bytes_down": 500_000, "started_at": 100.0, "ended_at": 160.0},
    {"round": 2, "bytes_up": 1_000_000, "bytes_down": 0, "started_at": 160.0, "ended_at": 280.0},
]


@pytest.mark.parametrize(
    ("name", "unit", "xs"),
    [("Rounds", "", [1, 2]), ("Bytes", "MB", [1.5, 2.5]), ("Time", "minutes", [1.0, 3.0])],
)
def test_rounds_are_drawn_against_rounds_bytes_or_time(name: str, unit: str, xs: list[float]) -> None:
    assert axis(name, ROUNDS)[1:] == (unit, xs)


@pytest.mark.parametrize(
    ("seconds", "unit", "end"), [(119.0, "seconds", 119.0), (7_200.0, "hours", 2.0), (172_800.0, "days", 2.0)]
)
def test_a_long_run_is_drawn_in_hours_or_days(seconds: float, unit: str, end: float) -> None:
    row = {"round": 1, "started_at": 100.0, "ended_at": 100.0 + seconds}
    assert axis("Time", [row])[1:] == (unit, [end])


@pytest.mark.parametrize("name", ["Rounds", "Bytes", "Time"])
def test_an_axis_without_rounds_has_no_points(name: str) -> None:
    assert axis(name, [])[2] == []


def ask(device: str, state: str = "training", **times: float) -> dict[str, Any]:
    """A row of a round's asks."""
    names = ("asked_at", "sent_at", "download_at", "downloaded_at", "upload_at", "acknowledged_at", "deadline_at")
    return {"device": device, "state": state, **dict.fromkeys(names), **times}


def test_the_states_of_an_ask_follow_each_other_without_gaps() -> None:
    one = ask("a", "acknowledged", asked_at=10, download_at=12, downloaded_at=13, upload_at=20, acknowledged_at=21)
    assert phases(one, now=30) == {
        "asked": (10, 12),
        "downloading": (12, 13),
        "training": (13, 20),
        "uploading": (20, 21),
    }


def test_open_ask_lasts_until_now_and_late_one_until_deadline() -> None:
    assert phases(ask("a", asked_at=10, download_at=12, downloaded_at=13), now=30)["training"] == (13, 30)
    late = ask("a", "late", asked_at=10, download_at=12, deadline_at=20)
    assert phases(late, now=30) == {"asked": (10, 12), "downloading": (12, 20)}


def test_acknowledged_ask_with_unknown_states_is_one_bar() -> None:
    one = ask("a", "acknowledged", asked_at=10, acknowledged_at=21)
    assert phases(one, now=30) == {"acknowledged": (10, 21)}


def test_bars_begin_when_the_device_was_asked() -> None:
    offset, asked, *_, last = bars([ask("a", "asked", asked_at=104.0)], start=100.0, now=110.0)
    assert (offset["data"], asked["data"]) == ([4.0], [6.0])
    assert last["data"][0]["state"] == "asked"


def test_a_method_that_asks_twice_shows_the_newest_ask() -> None:
    assert newest_asks([ask("a", "acknowledged"), ask("b", "asked"), ask("a", "training")]) == [
        ask("a", "training"),
        ask("b", "asked"),
    ]


def test_timeline_of_large_fleet_has_devices_furthest_behind() -> None:
    done = [ask(f"done-{number:04}", "acknowledged", acknowledged_at=float(number)) for number in range(1000)]
    shown = furthest_behind([*done, ask("slow", "uploading")])
    assert len(shown) == MAX_DEVICES
    assert {row["device"] for row in shown} == {
        "slow",
        *(f"done-{number:04}" for number in range(1001 - MAX_DEVICES, 1000)),
    }


def test_a_round_is_described_with_its_deadline() -> None:
    asks = [ask("a", "acknowledged", acknowledged_at=108.0, deadline_at=160.0), ask("b", deadline_at=160.0)]
    open_ = {"round": 3, "status": "open", "started_at": 100.0, "ended_at": None, "paused_at": None}
    said = sentence(asks, open_, now=110.0)
    assert said == "Round 3 is open: 1 of 2 devices acknowledged, 10 s since its beginning, deadline in 50 s."
    later = ask("c", deadline_at=190.0)  # of a later step
    assert sentence([*asks, later], open_, now=110.0).endswith("deadline in 1 min 20 s.")
    assert "No round has begun" in sentence([], {**open_, "round": None}, now=0.0)


def test_a_round_that_has_ended_is_drawn_to_its_end() -> None:
    closed = {"round": 3, "status": "closed", "started_at": 100.0, "ended_at": 120.0}
    assert latest_time([ask("a", "acknowledged", acknowledged_at=119.0)], closed) == 120.0


def test_a_receipt_after_the_end_of_a_round_is_drawn_too() -> None:
    """Answers to buffered rounds come later."""
    closed = {"round": 3, "status": "closed", "started_at": 100.0, "ended_at": 120.0}
    assert latest_time([ask("a", "acknowledged", asked_at=101.0, acknowledged_at=150.0)], closed) == 150.0


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({}, "away"),
        ({"present": True}, "present"),
        ({"present": True, "forgotten": "asked"}, "to be forgotten"),
        ({"forgotten": "2026-11-23T09:42:33Z"}, "forgotten"),
        ({"present": True, "forgotten": "asked", "revoked": True}, "revoked"),
    ],
)
def test_a_word_says_whether_a_device_is_there(row: dict[str, Any], word: str) -> None:
    assert presence({"present": False, "forgotten": None, "revoked": False, **row}) == word


def test_the_list_of_runs_has_the_accuracy_of_the_fleet_first() -> None:
    known = {"test_accuracy": 0.0, "method_accuracies": {"Teacher accuracy": 0.5}, "global_accuracy": 0.7}
    assert accuracy(known) == 0.0
    assert accuracy({**known, "test_accuracy": None}) == 0.5
    assert accuracy({**known, "test_accuracy": None, "method_accuracies": {}}) == 0.7
    assert accuracy({**dict.fromkeys(known), "method_accuracies": {}}) is None


def test_the_page_of_a_run_says_whose_accuracy_it_shows() -> None:
    known = {"test_accuracy": 0.0, "method_accuracies": {"Teacher accuracy": 0.5}, "global_accuracy": 0.7}
    assert last_accuracy(known) == "0.0 % (fleet)"
    assert last_accuracy({**known, "test_accuracy": None}) == "50.0 % (teacher accuracy)"
    assert last_accuracy({**known, "test_accuracy": None, "method_accuracies": {}}) == "70.0 % (global model)"
    assert last_accuracy({**dict.fromkeys(known), "method_accuracies": {}}) == "–"


@pytest.mark.parametrize(
    ("status", "left"),
    [
        ("running", "about 1 min 30 s"),
        ("preparing", "about 1 min 30 s"),
        ("running (no server)", "–"),
        ("paused", "–"),
        ("queued (1 of 2)", "–"),
        ("finished", "–"),
    ],
)
def test_only_a_run_at_work_has_a_time_left(status: str, left: str) -> None:
    assert time_left({"status": status, "seconds_left": 90.0}) == left
    assert time_left({"status": status, "seconds_left": None}) == "–"


def test_bytes_are_summed_by_kind() -> None:
    row = {"kind": "a", "up": 10, "down": 0, "up_sent": 6, "down_sent": 0}
    other = {"kind": "b", "up": 0, "down": 20, "up_sent": 0, "down_sent": 18}
    result = {item["kind"]: item for item in by_kind([row, other, row])}
    assert (result["a"]["up"], result["a"]["up_sent"], result["a"]["share"]) == (20, 12, 0.4)
    assert math.isclose(sum(item["share"] for item in result.values()), 1.0)


def test_bubbles_are_classes_with_samples() -> None:
    assert bubbles([{"counts": {"0": 3, "2": 1}}, {"counts": {"1": 2}}], ["x", "y", "z"]) == [
        (0, 0, 3),
        (2, 0, 1),
        (1, 1, 2),
    ]


def test_totals_are_of_all_classes_of_a_device() -> None:
    rows: list[dict[str, Any]] = [{"counts": {"0": 3, "2": 1}}, {"counts": {"1": 2}}, {"counts": {}}]
    assert totals(rows, ["x", "y", "z"])["data"] == [[2, 0, 4], [2, 1, 2], [2, 2, 0]]


def test_picture_of_large_fleet_says_how_many_devices_it_shows() -> None:
    rows = [{"device": str(number), "split": "train", "counts": {}} for number in range(1000)]
    shown = spread(rows, 60)
    assert (len(shown), shown[0], shown[-1]["device"]) == (60, rows[0], "983")
    assert "60 of 1,000 devices" in note(shown, 1000)
    assert "Not known" in note([], 0)


@pytest.mark.parametrize(
    ("server", "listen", "found"),
    [("fleet.example.org:50051", "0.0.0.0:50051", "fleet.example.org:50051"), ("", "10.0.0.5:6000", "10.0.0.5:6000")],
)
def test_a_device_is_told_the_address_that_it_can_reach(server: str, listen: str, found: str) -> None:
    assert address(server, listen) == found


def test_lines_for_app_are_python_naming_server_run_and_columns() -> None:
    needs = {"contract": {"classes": ["a", "b"], "input_shape": [1, 8, 8], "columns": ["features", "labels"]}}
    lines = embedding("h:1", 'odd"name', {"tls": True}, needs)
    compile(lines, "app.py", "exec")
    allow = 'allow=["features", "labels", "counts", "metrics"]'  # without the last two, pages show no accuracies
    for part in ('Server("h:1"', 'run="odd\\"name"', allow, "enrolment=token", "[N, 1, 8, 8]"):
        assert part in lines
    assert "enrolment" not in embedding("h:1", "r", {"tls": False}, needs)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "–"),
        (0.25, "0.2 s"),
        (59.7, "60 s"),
        (61, "1 min 1 s"),
        (3600, "1 h 0 min"),
        (172_740, "47 h 59 min"),
        (172_800, "2 d 0 h"),
    ],
)
def test_durations_have_their_units(seconds: float | None, shown: str) -> None:
    assert units.duration(seconds) == shown


def test_a_paused_deadline_stands_still() -> None:
    asks = [{"state": "training", "deadline_at": 1600.0}]
    facts = {"round": 2, "status": "open", "started_at": 1000.0, "paused_at": 1100.0}
    said = {sentence(asks, facts, now) for now in (1200.0, 1500.0)}
    assert {text.rpartition(", deadline")[2] for text in said} == {" in 8 min 20 s of work, once it is started again."}
    assert "deadline in 1 min 40 s." in sentence(asks, {**facts, "paused_at": None}, 1500.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(2 / 3, "2/3"), (0.1, "0.1"), (1e-5, "1e-05"), (0.123456789, "0.123456789"), (3, "3"), ("a", "a"), (None, "null")],
)
def test_a_setting_with_many_digits_is_a_fraction(value: object, text: str) -> None:
    assert units.setting(value) == text


def test_a_rate_of_nothing_is_a_figure() -> None:
    assert (units.percent(0.0), units.percent(None), units.size(0), units.size(None)) == ("0.0 %", "–", "0 B", "–")


def test_names_are_sorted_as_people_do() -> None:
    assert sorted(["d10", "E1", "d2", "D1"], key=units.natural) == ["D1", "d2", "d10", "E1"]


@pytest.mark.parametrize("state", [*ACTIVE, QUEUED, WAITING, IDLE])
def test_an_active_run_can_be_paused_and_stopped_in_any_state(state: str) -> None:
    offered = {action.verb for action in RUN_ACTIONS if action.statuses is None or state in action.statuses}
    assert offered == {"Pause", "Stop", "Delete"}
