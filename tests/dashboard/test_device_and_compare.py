"""What the page of a device and the comparison of runs make of the rows that they read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.dashboards import dashboard, picture

from fleetdistill_server.dashboard.pages import compare, device
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
