"""What the page of a device and the comparison of runs make of the rows that they read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.dashboards import dashboard, picture

from fleetdistill.knowledge import Metric, Metrics
from fleetdistill_console.dashboard.pages import compare, device
from fleetdistill_server.store.store import Store

NOON = 1_795_435_200.0  # 2026-11-23T12:00:00Z


@pytest.mark.parametrize(
    ("facts", "shown"),
    [
        ({"revoked": False, "certificate_expires": None}, "none (plain text)"),
        ({"revoked": False, "certificate_expires": "2026-11-23T15:30:00Z"}, "valid for 3 h 30 min"),
        ({"revoked": False, "certificate_expires": "2026-11-23T11:58:30Z"}, "expired 1 min 30 s ago"),
        ({"revoked": True, "certificate_expires": "2026-11-23T15:30:00Z"}, "revoked"),
    ],
)
def test_a_certificate_is_described_in_words(facts: dict[str, Any], shown: str) -> None:
    assert device.certificate(facts, NOON) == shown


def test_the_figures_of_a_device_are_drawn_by_variant_and_split() -> None:
    rows = [
        {"round": 1, "name": "accuracy", "split": "test", "mean": 0.5},
        {"round": 1, "name": "personal/accuracy", "split": "test", "mean": 0.75},
        {"round": 1, "name": "loss", "split": "train", "mean": 1.25},
        {"round": 2, "name": "accuracy", "split": "test", "mean": None},
    ]
    assert device.series(rows, "accuracy", 100) == {"test": [(1, 50.0)], "personal test": [(1, 75.0)]}
    assert device.series(rows, "loss", 1) == {"train": [(1, 1.25)]}


def test_the_page_of_a_device_has_its_figures_under_their_names() -> None:
    facts: dict[str, Any] = {
        "present": True,
        "revoked": False,
        "forgotten": None,
        "certificate_expires": None,
        "test_accuracy": 0.0,
    }
    facts |= {"model": "digits_linear", "parameters": 1_250, "samples": 3_000, "rounds": 12, "answers": 7, "asks": 10}
    facts |= {"late": 1, "declined": 2, "refusals": 3, "last_seen": "2026-11-23T12:00:00Z", "sdk": ""}
    assert device.tiles(facts) == {
        "Presence": "present",
        "Certificate": "none (plain text)",
        "Last test accuracy": "0.0 %",
        "Model": "digits_linear (1,250 parameters)",
        "Training samples": "3,000",
        "Rounds": "12",
        "Answers": "7 of 10 asks",
        "Late, declined, refused": "1, 2, 3",
        "Last seen (UTC)": "2026-11-23T12:00:00Z",
        "SDK": "–",
    }


def ask_of(step_number: int, upload: str | None) -> dict[str, Any]:
    """An ask of round 4 that was answered within 2.5 seconds."""
    row = {"round": 4, "step_number": step_number, "step": "train", "state": "acknowledged", "bytes": 10, "reason": ""}
    return {**row, "upload": upload, "not_used_because": "", "asked_at": NOON, "acknowledged_at": NOON + 2.5}


def test_each_ask_of_a_round_has_a_row_of_its_own() -> None:
    first, second = (device.ask_cells(ask_of(number, "used")) for number in (1, 2))
    assert first["id"] != second["id"]
    assert (first["asked"], first["seconds"]) == ("2026-11-23 12:00:00", 2.5)


@pytest.mark.parametrize(
    ("upload", "told"), [("used", "yes"), ("reported", "no"), ("acknowledged", "not yet"), (None, "")]
)
def test_an_answer_says_whether_it_is_in_the_result(upload: str | None, told: str) -> None:
    assert device.ask_cells(ask_of(1, upload))["upload"] == told


def test_an_ask_says_why_its_answer_is_missing_or_not_used() -> None:
    unused = {**ask_of(1, "reported"), "not_used_because": "the round ended without using the answer"}
    refused = {
        **ask_of(2, None),
        "state": "refused",
        "reason": "refused: the answer has a NaN",
        "acknowledged_at": None,
    }
    reasons = [device.ask_cells(row)["why"] for row in (unused, refused, ask_of(3, "used"))]
    assert reasons == ["the round ended without using the answer", "refused: the answer has a NaN", ""]


def test_the_last_figures_of_runs_are_compared_with_their_units() -> None:
    row = {"method": "fedavg", "status": "running", "completed_rounds": 1_200, "wanted_rounds": 2_000, "devices": 1_500}
    row |= {"test_accuracy": 0.5, "global_accuracy": None, "round_seconds": 61.0}
    row |= {"method_accuracies": {"Teacher accuracy": 0.25}}
    row |= {"bytes_up": 2_000_000, "bytes_down": 3_000_000_000, "created": "2026-11-23T12:00:00Z"}
    assert compare.figures(row) == {
        "Method": "fedavg",
        "Status": "running",
        "Rounds completed": "1,200 of 2,000",
        "Accuracy, fleet": "50.0 %",
        "Teacher accuracy": "25.0 %",
        "Accuracy, global model": "–",
        "Mean duration of the last 5 rounds": "1 min 1 s",
        "Received from devices": "2.00 MB",
        "Sent to devices": "3.00 GB",
        "Devices": "1,500",
        "Created (UTC)": "2026-11-23T12:00:00Z",
    }


def test_only_settings_that_differ_are_compared() -> None:
    a = {"run": {"rounds": 3, "method": "fedavg"}, "method": {"local_epochs": 1}}
    b = {"run": {"rounds": 3, "method": "feddkc"}, "method": {"refinement": "kkr"}}
    assert compare.differing({"a": a, "b": b}) == {
        "run.method": {"a": "fedavg", "b": "feddkc"},
        "method.local_epochs": {"a": "1", "b": "not set"},
        "method.refinement": {"a": "not set", "b": "kkr"},
    }
    assert compare.differing({"a": a, "c": a}) == {}


def test_runs_share_the_unit_of_their_axis() -> None:
    def row(number: int, sent: int, accuracy: float | None) -> dict[str, Any]:
        return {
            "round": number,
            "bytes_up": sent,
            "bytes_down": 0,
            "started_at": NOON,
            "ended_at": NOON + 60 * number,
            "test_accuracy": accuracy,
        }

    ended = {"small": [row(1, 500_000, 0.5)], "large": [row(1, 2_000_000, 0.25), row(2, 2_000_000, None)]}
    series, _, unit = compare.drawn(ended, "Bytes", "test_accuracy", 100)
    assert (series, unit) == ({"small": [(0.5, 50.0)], "large": [(2.0, 25.0)]}, "MB")
    series, _, unit = compare.drawn(ended, "Time", "test_accuracy", 100)
    assert (series["large"], unit) == ([(1.0, 25.0)], "minutes")


@pytest.mark.slow
@pytest.mark.long
def test_runs_are_chosen_and_compared_in_a_browser(tmp_path: Path, page: Any) -> None:
    store = Store.open(tmp_path / "store")
    for number in range(6):
        run = {"name": f"run-{number}", "method": "fedavg", "rounds": 10 + number}
        store.runs.begin(f"run-{number}", {"run": run})
    store.close()
    with dashboard(tmp_path, "--store", str(tmp_path / "store")) as address:
        page.goto(f"{address}/compare?runs=run-0,run-1")
        page.get_by_role("row", name="run.rounds 10 11").wait_for()
        page.get_by_role("row", name="Rounds completed 0 of 10 0 of 11").wait_for()
        picture(page, "compare")
        page.get_by_role("combobox", name="Runs, at most 5").click()
        page.get_by_role("option", name="run-3").click()
        page.keyboard.press("Escape")
        page.get_by_role("row", name="run.rounds 10 11 13").wait_for()
        page.goto(f"{address}/compare?runs=" + ",".join(f"run-{number}" for number in range(6)))
        page.get_by_text("Only the first 5 runs are shown.").wait_for()
        page.get_by_role("row", name="run.rounds 10 11 12 13 14").wait_for()
        page.goto(f"{address}/compare?runs=run-0,gone")
        page.get_by_text("There is no run 'gone'").wait_for()


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    """A store with two runs of one round, with figures of one device; made before the browser has its event loop."""
    store = Store.open(tmp_path / "store")
    for run, right, loss in (("run-0", 2, 5.0), ("run-1", 3, 3.0)):
        store.runs.begin(run, {"run": {"name": run, "method": "fedavg", "rounds": 3}})
        accuracy = Metric(name="accuracy", split="test", sum=right, count=4)
        figures = [accuracy, Metric(name="loss", split="train", sum=loss, count=4)]
        store.history.add_figures(run, store.runs.start_round(run, ["a"]), "a", Metrics(metrics=figures))
        store.runs.close_round(run, 1, b"", [], {})
    store.close()
    return tmp_path


@pytest.mark.slow
@pytest.mark.long
def test_the_curves_of_compared_runs_have_their_units(two_runs: Path, page: Any) -> None:
    with dashboard(two_runs, "--store", "store") as url:
        page.goto(f"{url}/compare?runs=run-0,run-1")
        names = []
        for chart in ("Accuracy", "Training loss"):
            drawn = page.get_by_role("img", name=re.compile(f"^{chart} by round: run-0.*run-1"))
            drawn.wait_for()
            names.append(drawn.get_attribute("aria-label"))
    assert names == [
        "Accuracy by round: run-0 50 %, run-1 75 % at 1",
        "Training loss by round: run-0 1.25 nats, run-1 0.75 nats at 1",
    ]
